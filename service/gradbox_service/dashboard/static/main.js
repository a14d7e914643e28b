// The page: log in, choose a view by the address, and keep it up to date.

import { call, get } from "/static/api.js";
import { box, connect, disconnect, onChange } from "/static/box.js";
import { h, say, set } from "/static/dom.js";
import { showJob } from "/static/job.js";
import { jobs } from "/static/jobs.js";
import { models } from "/static/models.js";
import { held } from "/static/operation.js";
import { overview } from "/static/overview.js";
import { problemBlock } from "/static/problem.js";
import { run } from "/static/run.js";
import { runs } from "/static/runs.js";
import { store, stores } from "/static/stores.js";
import { use } from "/static/use.js";

const VIEWS = { "": overview, jobs, runs, stores, use, models };
// What is behind a name of the view: a view of its own; of others, a job's dialog.
const ONE_OF = { runs: run, stores: store };
const main = document.getElementById("main");
const bar = document.getElementById("bar");
const dialog = document.getElementById("job");
let view = null;
let shown = null;
let leaveJob = null;

async function begin() {
  try {
    const { you } = await get("/v1/session");
    if (you) enter(you);
    else askForToken();
  } catch (problem) {
    main.replaceChildren(problemBlock(problem, { again: begin }));
  }
}

function enter(you) {
  box.you = you;
  bar.hidden = false;
  say(document.getElementById("you"), you.admin && you.name !== "owner" ? `${you.name} (owner)` : you.name);
  connect(async () => {
    const answer = await get("/v1/session").catch(() => null);
    if (answer && !answer.you) askForToken("Your session is over: you logged out in another window, the token was revoked, or a week has passed.");
    else setTimeout(() => enter(you), 2000);
  });
  route();
}

function askForToken(why) {
  disconnect();
  leave();
  bar.hidden = true;
  document.title = "Log in · gradbox";
  const field = h("input", { id: "token", type: "password", autocomplete: "current-password", required: true, spellcheck: "false", placeholder: "gbx_…" });
  const trouble = h("div");
  const button = h("button", { type: "submit", class: "primary", text: "Log in" });
  const form = h("form", { class: "log-in" },
    h("h1", { text: "gradbox" }),
    h("p", { class: "where", text: location.host }),
    why && h("p", { class: "why", role: "status", text: why }),
    h("label", { for: "token", text: "Token" }), field, trouble, button,
    h("p", { class: "help" }, "The box's owner makes one with ", h("code", { text: "gradbox tokens create NAME" }), "; the owner's own is in ", h("code", { text: "client.toml" }), " in the data folder."));
  form.addEventListener("submit", async (event) => {
    event.preventDefault();
    button.disabled = true;
    try {
      const { you } = await call("POST", "/v1/session", { token: field.value });
      enter(you);
    } catch (problem) {
      trouble.replaceChildren(problemBlock(problem));
      field.setAttribute("aria-invalid", "true");
      field.focus();
    } finally {
      button.disabled = false;
    }
  });
  main.replaceChildren(form);
  field.focus();
}

function route() {
  const [, name = "", id] = location.hash.split("/");
  const named = Object.hasOwn(VIEWS, name) ? name : "";
  const one = id && ONE_OF[named];
  const wanted = one ? `${named}/${id}` : named;
  if (view === null || shown !== wanted) {
    const moved = view !== null;
    leave();
    shown = wanted;
    view = one ? one(id) : VIEWS[named]();
    main.replaceChildren(view.element);
    document.title = `${view.title} · gradbox`;
    for (const link of document.querySelectorAll("#views a")) set(link, "aria-current", link.hash === `#/${named}` ? "page" : null);
    if (moved) view.element.querySelector("h1").focus({ preventScroll: true });
    if (moved) scrollTo(0, 0);
    draw();
  }
  if (leaveJob) leaveJob();
  leaveJob = null;
  if (id && !one) leaveJob = showJob(id);
  else if (dialog.open) dialog.close();
}

function leave() {
  view?.leave?.();
  view = shown = null;
  if (dialog.open) dialog.close();
}

function draw() {
  const live = document.getElementById("live");
  say(live, box.connected ? "live" : "connecting");
  set(live, "data-live", box.connected ? "" : null);
  const strip = document.getElementById("held");
  say(strip, held());
  strip.hidden = !strip.textContent;
  if (view && box.ready) {
    view.update();
    main.removeAttribute("aria-busy");
  } else if (view) main.setAttribute("aria-busy", "true");
}

dialog.addEventListener("close", () => {
  if (leaveJob) leaveJob();
  leaveJob = null;
  if (location.hash.split("/")[2]) location.hash = `#/${shown ?? ""}`;
});
dialog.addEventListener("click", (event) => event.target === dialog && dialog.close());
document.getElementById("log-out").addEventListener("click", async () => {
  await call("DELETE", "/v1/session").catch(() => null);
  askForToken();
});
addEventListener("hashchange", () => view && route());
onChange(draw);
begin();
