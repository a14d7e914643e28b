// What the service lists of the caller's, or of everybody's for the box's owner, asked for again
// when a job of theirs has ended, and every few seconds.

import { get } from "/static/api.js";
import { box, onEnd } from "/static/box.js";
import { h } from "/static/dom.js";
import { problemBlock } from "/static/problem.js";

const LIMIT = 100;
const PAUSE_MS = 800;
// A job that began and ended between two pictures of the box was in neither.
const AGAIN_MS = 5000;

/** The newest of `/v1/NOUN`; `changed` is called after each answer, `command` lists more of them. */
export function listing(noun, changed, command) {
  const trouble = h("div");
  const behind = h("p", { class: "behind" }, `The newest ${LIMIT} are shown; `, h("code", { text: command }), " has more.");
  const check = h("input", { type: "checkbox", on: { change: () => { asked = true; list.everybodys = check.checked; load(); } } });
  const list = { items: [], loaded: false, more: false, everybodys: false, query: {}, trouble, behind, load, soon, leave, check: box.you?.admin && h("label", { class: "check" }, check, "Everybody's") };
  let asked = false; // by the checkbox
  let timer = 0;

  async function load() {
    clearTimeout(timer);
    timer = 0;
    const query = new URLSearchParams({ limit: LIMIT, ...list.query, ...(list.everybodys && { all: true }) });
    try {
      const answer = await get(`/v1/${noun}?${query}`);
      // The box's owner may have none, and wants to see the others'.
      if (!answer[noun].length && box.you.admin && !list.everybodys && !asked && !Object.keys(list.query).length) {
        check.checked = list.everybodys = true;
        return load();
      }
      list.items = answer[noun];
      list.more = answer.next !== null;
      list.loaded = true;
      trouble.replaceChildren();
    } catch (problem) {
      trouble.replaceChildren(problemBlock(problem, { again: load }));
    }
    changed();
  }

  function soon() {
    if (!timer) timer = setTimeout(load, PAUSE_MS);
  }

  const stop = onEnd((job) => job.id && soon());
  const clock = setInterval(() => document.hidden || soon(), AGAIN_MS);

  function leave() {
    stop();
    clearInterval(clock);
    clearTimeout(timer);
  }
  return list;
}
