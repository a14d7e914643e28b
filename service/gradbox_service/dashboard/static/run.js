// One run: what it trains and how far it is, and curves over its steps, which grow with it.

import { get } from "/static/api.js";
import { box, now } from "/static/box.js";
import { curves } from "/static/curves.js";
import { h, say } from "/static/dom.js";
import { ago, bytes, duration, figure, plural } from "/static/format.js";
import { problemBlock } from "/static/problem.js";
import { optimizer } from "/static/runs.js";

// Asked again after a picture of the box, but not more often.
const PAUSE_MS = 900;
const PAGE = 1000;
const MAX_STEPS = 10_000;

export function run(id) {
  let found = null;
  let steps = [];
  let asking = false;
  let gone = false;
  let askedAt = 0;
  let pictures = -1;
  let logarithmic = false;
  const title = h("h1", { tabindex: -1, text: "Run" });
  const trouble = h("div");
  const facts = h("dl", { class: "facts run-facts" });
  const charts = {
    loss: curves({ title: "Loss", format: figure }),
    grad_norm: curves({ title: "Gradient norm", format: figure, fromZero: true }),
    lr: curves({ title: "Learning rate", format: figure, fromZero: true }),
    seconds: curves({ title: "Seconds per step", format: duration, fromZero: true }),
  };
  const drawn = h("div", { class: "charts run-charts" }, ...Object.values(charts).map((chart) => chart.element));
  const scales = h("div", { class: "choice", role: "group", "aria-label": "Scale of loss and gradient norm" }, ...[["Linear", false], ["Log", true]].map(([text, value]) =>
    h("button", { type: "button", text, "aria-pressed": String(value === logarithmic), on: { click: (event) => scale(event.currentTarget, value) } })));
  const behind = h("p", { class: "behind" }, `The newest ${MAX_STEPS.toLocaleString()} steps are drawn; `, h("code", { text: "run.history()" }), " has all.");
  const empty = h("div", { class: "empty" }, h("p", { text: "No step was made yet. The first one shows up here by itself." }));
  const element = h("div", { class: "view" },
    h("div", { class: "head" }, h("a", { class: "back", href: "#/runs", text: "Runs" }), title, scales),
    trouble, facts, drawn, behind, empty);

  async function look() {
    asking = true;
    pictures = box.pictures;
    try {
      found = await get(`/v1/runs/${id}`);
      let last = steps.length ? steps.at(-1).number : Math.max(0, found.num_steps - MAX_STEPS);
      while (last < found.num_steps) {
        const more = (await get(`/v1/runs/${id}/steps?after=${last}&limit=${PAGE}`)).steps;
        if (!more.length) break;
        steps.push(...more);
        last = steps.at(-1).number;
      }
      steps = steps.slice(-MAX_STEPS);
      trouble.replaceChildren();
    } catch (problem) {
      trouble.replaceChildren(problemBlock(problem, { again: look }));
      gone = problem.status === 404;
      if (gone) found = null;
    }
    update();
    draw();
    asking = false;
    askedAt = Date.now();
  }

  function scale(button, value) {
    logarithmic = value;
    for (const other of scales.children) other.setAttribute("aria-pressed", String(other === button));
    draw();
  }

  function draw() {
    if (!steps.length || !element.isConnected) return;
    const width = Math.max(240, charts.seconds.element.clientWidth - 30);
    const numbers = steps.map((step) => step.number);
    const one = (field) => [{ name: "", kind: "hue-0", values: steps.map((step) => step[field]) }];
    const losses = steps.some((step) => step.loss !== null);
    charts.loss.element.hidden = !losses;
    if (losses) charts.loss.update({ numbers, series: one("loss"), width, logarithmic });
    charts.grad_norm.update({ numbers, series: one("grad_norm"), width, logarithmic });
    charts.lr.update({ numbers, series: rates(found, steps), width });
    charts.seconds.update({ numbers, series: one("seconds"), width });
  }

  function update() {
    if (!asking && !gone && pictures !== box.pictures && !document.hidden && Date.now() - askedAt >= PAUSE_MS) look();
    facts.hidden = !found;
    drawn.hidden = scales.hidden = !found || !steps.length;
    empty.hidden = !found || steps.length > 0;
    behind.hidden = !found || !steps.length || steps[0].number === 1 || steps.length < MAX_STEPS;
    if (!found) return;
    say(title, found.name || `Run ${id.slice(0, 8)}`);
    describe(facts, found);
  }

  const observer = new ResizeObserver(draw);
  observer.observe(drawn);
  update();
  return { element, update, title: "Run", leave: () => observer.disconnect() };
}

/** The learning rates as curves: one, or one for each of the optimizer's groups and for the rest. */
function rates(found, steps) {
  const groups = found.optimizer.groups ?? [];
  const names = groups.length ? [...groups.map((group) => group.wrt.join(" ")), "the rest"] : [""];
  return names.map((name, index) => ({ name, kind: `hue-${index % 6}`, values: steps.map((step) => step.lr[index] ?? null) }));
}

/** What an optimizer has beside its rate. */
function options({ options = {}, groups = [] }) {
  const others = Object.entries(options).filter(([name]) => name !== "lr").map(([name, value]) => `, ${name} ${Array.isArray(value) ? value.join(" ") : value}`);
  return others.join("") + (groups.length ? `, ${plural(groups.length, "group")}` : "");
}

/** Write the facts; those that change stay the same elements. */
function describe(list, found) {
  const job = [...box.jobs.values()].find((other) => other.id && other.id === found.under_way);
  const next = found.under_way && h("a", { href: `#/jobs/${found.under_way}`, text: `step ${found.num_steps + 1}` });
  const doing = job ? (job.state === "running" ? " is made" : " waits") : " is under way";
  const pairs = [
    ["Model", found.model],
    ["Optimizer", `${optimizer(found)}${options(found.optimizer)}`],
    ["Trains", found.adapter ? `an adapter at ${found.adapter.targets.join(", ")}` : found.wrt ? found.wrt.join(", ") : "all parameters"],
    ["Owner", found.owner],
    ["Mode, precision, seed", `${found.mode}, ${found.precision}, ${found.seed}`],
    ["Steps", String(found.num_steps)],
    ["Last step", found.last_step_s === null ? "none yet" : ago(now() - found.last_step_s)],
    ["Now", next ? [next, doing] : "nothing is under way"],
    ["On disk", found.state_step === null ? "nothing yet" : `the state after step ${found.state_step}, ${bytes(found.state_bytes)}`],
    ["Saved as", found.saves.length ? found.saves.map((save) => `${save.name} (step ${save.step}${save.shared ? ", shared" : ""})`).join(", ") : "not saved"],
    ["Id", found.id],
  ];
  if (!list.childElementCount) for (const [name] of pairs) list.append(h("dt", { text: name }), h("dd"));
  pairs.forEach(([, value], index) => {
    const place = list.children[2 * index + 1];
    if (typeof value === "string") say(place, value);
    else if (place.textContent !== value.map((part) => part.textContent ?? part).join("")) place.replaceChildren(...value);
  });
}
