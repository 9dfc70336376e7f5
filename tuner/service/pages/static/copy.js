// A button beside each command that copies it. Without this script the command is text to be marked.
"use strict";
globalThis.copyButtons = (root) => {
  for (const held of root.querySelectorAll("code.copy")) {
    const button = document.createElement("button");
    button.type = "button";
    button.className = "copier";
    button.textContent = "Copy";
    button.addEventListener("click", async () => {
      try {
        await navigator.clipboard.writeText(held.textContent);
        button.textContent = "Copied";
      } catch {
        getSelection().selectAllChildren(held);
        button.textContent = "Marked: copy it with your keyboard";
      }
      setTimeout(() => { button.textContent = "Copy"; }, 2000);
    });
    held.after(" ", button);
  }
};
globalThis.copyButtons(document);
