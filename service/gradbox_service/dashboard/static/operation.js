// Whether the box hands out jobs: said to everybody, and changed by its owner, who is asked first.

import { call } from "/static/api.js";
import { box } from "/static/box.js";
import { h, prose } from "/static/dom.js";
import { weekTime } from "/static/format.js";
import { problemBlock } from "/static/problem.js";

const ORDERS = {
  running: { verb: "Resume", effect: "Jobs are taken, and handed to workers again." },
  paused: { verb: "Pause", effect: "Jobs that run go on. All others wait until you resume, also over a restart of the box." },
  draining: { verb: "Drain", effect: "Jobs that run go on, and new ones are refused. `gradbox up` ends once nothing runs; what waits runs after its next start." },
};
const NEXT = { running: ["paused", "draining"], paused: ["running", "draining"], draining: ["running"] };

/** Why no job is handed to a worker; "" while jobs are. */
export function held() {
  const { mode, by, reason, since_s } = box.operation;
  if (mode === "running") return "";
  const what = mode === "draining" ? "New jobs are refused, and those that wait begin after its next start." : "Jobs wait until it is resumed.";
  // No time that ticks: a screen reader would say the whole line with each tick.
  return `The box is ${mode}${by && ` by ${by}`}${since_s ? ` since ${weekTime(since_s)}` : ""}${reason && `: ${reason}`}. ${what}`;
}

/** The owner's buttons; returns the element and what updates it. */
export function orders() {
  const buttons = Object.entries(ORDERS).map(([mode, { verb }]) =>
    ({ mode, element: h("button", { type: "button", class: "quiet", text: `${verb}…`, on: { click: () => ask(mode) } }) }));
  const element = h("div", { class: "orders", role: "group", "aria-label": "The whole box" }, ...buttons.map((button) => button.element));
  return {
    element,
    update() {
      for (const button of buttons) button.element.hidden = !NEXT[box.operation.mode].includes(button.mode);
    },
  };
}

function ask(mode) {
  const { verb, effect } = ORDERS[mode];
  const reason = h("input", { id: "reason", maxlength: 200, autocomplete: "off" });
  const trouble = h("div");
  const form = h("form", {},
    h("h2", { id: "order-title", text: `${verb} the box?` }),
    h("p", {}, ...prose(effect)),
    mode !== "running" && [h("label", { for: "reason", text: "Reason, told to everybody who waits" }), reason],
    trouble,
    h("div", { class: "actions" },
      h("button", { type: "submit", class: "primary", text: verb }),
      h("button", { type: "button", text: "Leave it", on: { click: () => dialog.close() } })));
  const dialog = h("dialog", { class: "ask", "aria-labelledby": "order-title", on: { close: () => dialog.remove() } }, form);
  form.addEventListener("submit", async (event) => {
    event.preventDefault();
    try {
      await call("PUT", "/v1/operation", { mode, reason: reason.value });
      dialog.close();
    } catch (problem) {
      trouble.replaceChildren(problemBlock(problem));
    }
  });
  document.body.append(dialog);
  dialog.showModal();
}
