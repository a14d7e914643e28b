// The button that cancels a job: asked twice, said once.

import { call } from "/static/api.js";
import { announce, h } from "/static/dom.js";
import { problemBlock } from "/static/problem.js";

const SECOND_CLICK_MS = 4000;

export function cancelButton(id, name) {
  let timer = 0;
  const button = h("button", { type: "button", class: "quiet", text: "Cancel", "aria-label": `Cancel ${name}` });
  const calm = () => {
    clearTimeout(timer);
    timer = 0;
    button.textContent = "Cancel";
    button.setAttribute("aria-label", `Cancel ${name}`);
    button.classList.remove("sure");
  };
  button.addEventListener("click", async () => {
    if (!timer) {
      button.textContent = "Sure?";
      button.setAttribute("aria-label", `Really cancel ${name}`);
      button.classList.add("sure");
      timer = setTimeout(calm, SECOND_CLICK_MS);
      return;
    }
    calm();
    button.disabled = true;
    try {
      await call("DELETE", `/v1/jobs/${id}`);
      announce(`${name} is being cancelled`);
    } catch (problem) {
      button.disabled = false;
      button.replaceWith(problemBlock(problem));
    }
  });
  return button;
}
