// A card beside the mark that is pointed at or focused; without this script the browser's own tooltip tells it.
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
  for (const title of document.querySelectorAll("figure svg a title, figure svg circle > title")) {
    const mark = title.parentElement;
    const text = title.textContent;
    const held = mark.closest("a") || mark;
    title.remove();
    held.addEventListener("pointerenter", () => show(mark, text));
    held.addEventListener("focus", () => show(mark, text));
    held.addEventListener("pointerleave", () => { card.hidden = true; });
    held.addEventListener("blur", () => { card.hidden = true; });
  }
})();
