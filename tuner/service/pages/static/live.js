// Keeps a live part of a page fresh while a run goes on. Without this script the page shows the state at its load.
"use strict";
(() => {
  const part = document.querySelector("[data-live]");
  if (!part) return;
  const status = document.querySelector("[data-live-state]");
  const every = Number(part.dataset.every) || 2000;
  let tag = part.dataset.tag || "";
  const say = (text) => { if (status && status.textContent !== text) status.textContent = text; };
  const state = new Map();
  const said = (each) => each.querySelector("summary").textContent;
  part.addEventListener("click", (event) => {
    const fold = event.target.closest("summary")?.parentElement;
    if (fold) state.set(said(fold), !fold.open);
  });
  const put = (html) => {
    const held = document.activeElement;
    const link = part.contains(held) ? held.getAttribute("href") : null;
    const left = part.querySelector(".wide")?.scrollLeft || 0;
    const folded = held && held.matches("summary") && part.contains(held) ? held.textContent : "";
    part.innerHTML = html;
    globalThis.localTimes(part);
    globalThis.copyButtons(part);
    globalThis.liveMarks(part);
    if (part.querySelector(".wide")) part.querySelector(".wide").scrollLeft = left;
    for (const each of part.querySelectorAll("details")) {
      if (state.has(said(each))) each.open = state.get(said(each));
      if (folded && said(each) === folded) each.querySelector("summary").focus({ preventScroll: true });
    }
    if (link) {
      const same = [...part.querySelectorAll("a")].find((a) => a.getAttribute("href") === link);
      if (same) same.focus({ preventScroll: true });
    }
  };
  const look = async () => {
    if (!document.hidden) {
      try {
        const headers = { "X-Live": "1", "If-None-Match": tag };
        const answer = await fetch(part.dataset.live, { headers, cache: "no-store", redirect: "error" });
        if (answer.status === 401) { say("Your token is no longer valid: load the page again to log in."); return; }
        if (answer.status === 200) { put(await answer.text()); tag = answer.headers.get("ETag") || ""; say(""); }
        else if (answer.status === 304) say("");
        else say("The service cannot tell the news just now; trying again.");
        if (answer.headers.get("X-Running") === "0") { say("The run has ended."); return; }
      } catch { say("The service does not answer; trying again."); }
    }
    setTimeout(look, every);
  };
  setTimeout(look, every);
})();
