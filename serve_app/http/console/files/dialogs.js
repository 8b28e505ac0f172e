// Dialogs: questions before a change, forms, and secrets that are shown once. The browser keeps the focus inside, closes
// with Escape, and gives the focus back.

import { h } from "./dom.js";
import { button, warning } from "./parts.js";

/**
 * Open a dialog; resolves with what `act` returns, or null when it was left.
 * `act(form)`: called on confirmation; its error is shown and the dialog stays.
 */
export function openDialog({ title, body = [], confirm = "Confirm", danger = false, act, cancel = "Cancel" }) {
  return new Promise((resolve) => {
    const opener = document.activeElement;
    let result = null;
    const problem = h("div", { class: "problem" });
    const yes = h("button", { type: "submit", class: danger ? "danger" : "primary" }, confirm);
    const no = cancel ? button(cancel, () => dialog.close(), { autofocus: danger }) : null;
    const onsubmit = async (event) => {
      event.preventDefault();
      yes.disabled = true;
      problem.replaceChildren();
      try {
        result = act ? await act(form) : true;
        dialog.close();
      } catch (error) {
        problem.replaceChildren(warning(error.message));
        const wrong = error.param && form.elements.namedItem(error.param.split(".").pop());
        if (wrong instanceof HTMLElement) wrong.focus();
      } finally {
        yes.disabled = false;
      }
    };
    const form = h("form", { onsubmit, novalidate: true }, h("h2", { id: "dialog-title" }, title), body, problem, h("div", { class: "buttons" }, no, yes));
    const dialog = h("dialog", { "aria-labelledby": "dialog-title" }, form);
    dialog.addEventListener("close", () => {
      dialog.remove();
      if (opener instanceof HTMLElement && opener.isConnected) opener.focus();
      resolve(result);
    });
    document.body.append(dialog);
    dialog.showModal();
  });
}

/** A secret that is shown this once, with a button that copies it. */
export function showSecret(title, secret, note) {
  const state = h("span", { class: "note", role: "status" });
  const copy = button("Copy", async () => {
    try {
      await navigator.clipboard.writeText(secret);
      state.textContent = "Copied.";
    } catch {
      getSelection().selectAllChildren(code);
      state.textContent = "Selected: copy it with the keyboard.";
    }
  });
  const code = h("code", { class: "secret", tabindex: "0", "aria-label": "The key" }, secret);
  return openDialog({ title, body: [h("p", null, note), h("p", { class: "secret-row" }, code, copy), state], confirm: "I have stored it", cancel: null });
}
