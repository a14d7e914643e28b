// Elements from plain data. Text is only ever set as text: nothing here parses HTML.

const SVG = "http://www.w3.org/2000/svg";
const COPIED_MS = 2000;

/** An HTML element; `props` are attributes, and `on` (listeners), `style`, `text`, `dataset`. */
export function h(tag, props = {}, ...children) {
  return fill(document.createElement(tag), props, children);
}

/** The same in SVG. */
export function svg(tag, props = {}, ...children) {
  return fill(document.createElementNS(SVG, tag), props, children);
}

function fill(element, props, children) {
  for (const [name, value] of Object.entries(props)) {
    if (value === undefined || value === null || value === false) continue;
    if (name === "on") {
      for (const [kind, listener] of Object.entries(value)) element.addEventListener(kind, listener);
    } else if (name === "style") {
      for (const [property, text] of Object.entries(value)) element.style.setProperty(property, text);
    } else if (name === "dataset") Object.assign(element.dataset, value);
    else if (name === "text") element.textContent = value;
    else element.setAttribute(name, value === true ? "" : value);
  }
  element.append(...children.flat().filter((child) => child !== null && child !== undefined && child !== false));
  return element;
}

/** Set an element's text, if it is another one: what does not change is not repainted or announced. */
export function say(element, text) {
  if (element.textContent !== text) element.textContent = text;
}

/** Set or remove an attribute, if it is another one. */
export function set(element, name, value) {
  if (value === null || value === undefined || value === false) element.removeAttribute(name);
  else if (element.getAttribute(name) !== String(value)) element.setAttribute(name, value);
}

/**
 * Let the children of `parent` be those of `items`, in order, and keep the elements of items that
 * were there before: focus, hover and scrolling survive an update.
 *
 * `make(item)` returns an element; `update(element, item)` writes what may change.
 */
export function keyed(parent, items, { key, make, update }) {
  const wanted = new Set(items.map(key));
  const before = new Map();
  for (const child of [...parent.children]) {
    if (wanted.has(child.dataset.key)) before.set(child.dataset.key, child);
    else child.remove(); // first, so that those that stay need not move
  }
  let place = parent.firstElementChild;
  for (const item of items) {
    const name = key(item);
    let element = before.get(name);
    if (!element) {
      element = make(item);
      element.dataset.key = name;
    }
    update(element, item);
    if (element === place) place = place.nextElementSibling;
    else parent.insertBefore(element, place);
  }
}

/** Text with `code` in backticks, as the service writes it: a list of nodes. */
export function prose(text) {
  return text.split("`").map((part, index) => (index % 2 ? h("code", { text: part }) : part));
}

/** A button that copies what an element says. */
export function copyButton(element) {
  const button = h("button", { type: "button", class: "quiet", text: "Copy" });
  button.addEventListener("click", async () => {
    getSelection().selectAllChildren(element); // where the browser lets no page write to the clipboard
    await navigator.clipboard?.writeText(element.textContent);
    button.textContent = navigator.clipboard ? "Copied" : "Selected";
    setTimeout(() => { button.textContent = "Copy"; }, COPIED_MS);
  });
  return button;
}

/** Say something to a screen reader, once. */
export function announce(text) {
  document.getElementById("announcement").textContent = text;
}
