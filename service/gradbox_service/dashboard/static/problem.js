// How an error looks: what happened, why, and what to do.

import { h, prose } from "/static/dom.js";

const HELP = {
  transient: "This passes by itself: try again in a few seconds.",
  server: "Tell the box's owner; the log of the service or the worker says more.",
};

/** A block for a Problem, or for the `error` of a job. `again` makes a button of it. */
export function problemBlock(problem, { again, role = "alert" } = {}) {
  const requestId = problem.requestId ?? problem.request_id;
  const help = HELP[problem.category];
  return h("div", { class: "problem", role },
    h("strong", { text: problem.title }),
    h("p", { class: "detail" }, ...prose(problem.message ?? problem.detail)),
    help && h("p", { class: "help", text: help }),
    requestId && problem.category === "server" && h("p", { class: "help" }, "Request id ", h("code", { text: requestId })),
    again && h("button", { type: "button", text: "Try again", on: { click: again } }),
  );
}
