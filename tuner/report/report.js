// A card beside the mark that is pointed at or focused, and arrow keys from mark to mark inside a drawing, which
// is one stop of the keyboard. Without this script the browser's own tooltip tells what a mark is.
"use strict";
(() => {
  const card = document.createElement("div");
  card.className = "card";
  card.hidden = true;
  card.setAttribute("aria-hidden", "true");
  document.body.append(card);
  const show = (mark, text) => {
    card.textContent = text;
    card.hidden = false;
    const box = mark.getBoundingClientRect();
    const left = Math.min(box.right + 10, document.documentElement.clientWidth - card.offsetWidth - 8);
    card.style.left = `${Math.max(8, left) + window.scrollX}px`;
    card.style.top = `${box.bottom + 8 + window.scrollY}px`;
  };
  const walk = (svg, event) => {
    const step = { ArrowRight: 1, ArrowDown: 1, ArrowLeft: -1, ArrowUp: -1 }[event.key];
    if (!step) return;
    event.preventDefault();
    const marks = [...svg.querySelectorAll("a")];
    const now = marks.indexOf(document.activeElement);
    const next = now < 0 ? (step > 0 ? 0 : marks.length - 1) : (now + step + marks.length) % marks.length;
    marks[next]?.focus();
  };
  globalThis.liveMarks = (root) => {
    card.hidden = true;
    for (const title of root.querySelectorAll("figure svg a title, figure svg circle > title")) {
      const mark = title.parentElement;
      const text = title.textContent;
      const held = mark.closest("a") || mark;
      title.remove();
      held.addEventListener("pointerenter", () => show(mark, text));
      held.addEventListener("focus", () => show(mark, text));
      held.addEventListener("pointerleave", () => { card.hidden = true; });
      held.addEventListener("blur", () => { card.hidden = true; });
    }
    for (const svg of root.querySelectorAll("svg[data-marks]")) svg.addEventListener("keydown", (event) => walk(svg, event));
  };
  globalThis.liveMarks(document);
})();
