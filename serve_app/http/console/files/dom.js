// Elements without markup. Every text becomes a text node, so nothing that the server sends is ever parsed as HTML.

/**
 * Make an element. `props`: attributes, but `on...` are handlers, `style` is an object of CSS properties, `key` names
 * the element among its siblings for `morph`. Children: nodes, texts, numbers, lists; null and false are left out.
 */
export function h(tag, props, ...children) {
  const element = document.createElement(tag);
  for (const [name, value] of Object.entries(props ?? {})) if (name !== "value") set(element, name, value);
  append(element, children);
  if (props?.value !== undefined && props.value !== null) element.value = props.value; // of a select: behind its options
  return element;
}

function set(element, name, value) {
  if (value === null || value === undefined || value === false) return;
  if (name.startsWith("on")) element[name] = value;
  else if (name === "key") element.dataset.key = value;
  else if (name === "style") for (const [property, text] of Object.entries(value)) element.style.setProperty(property, text);
  else element.setAttribute(name, value === true ? "" : String(value));
}

function append(element, children) {
  for (const child of children.flat(Infinity)) {
    if (child === null || child === undefined || child === false) continue;
    element.append(child instanceof Node ? child : document.createTextNode(String(child)));
  }
}

let held = 0;

/** A place in a drawn page for an element that lives on from one drawing to the next, and is its owner's to change. */
export function hold(element) {
  element.dataset.key ??= `held-${(held += 1)}`;
  element.dataset.keep = "";
  const place = document.createElement(element.tagName);
  Object.assign(place.dataset, { key: element.dataset.key, keep: "" });
  place.held = element;
  return place;
}

/** An element that was drawn, with the held ones in their places. */
function settle(drawn) {
  if (drawn.held) return drawn.held;
  if (drawn.querySelectorAll) for (const place of drawn.querySelectorAll("[data-keep]")) if (place.held) place.replaceWith(place.held);
  return drawn;
}

const HANDLERS = ["onclick", "onsubmit", "onchange", "oninput", "onkeydown"];

/** Make `current` show what `wanted` shows; elements that stay keep their focus, their input and their scrolling. */
export function morph(current, wanted) {
  if (current.nodeType === Node.TEXT_NODE) {
    if (current.data !== wanted.data) current.data = wanted.data;
    return;
  }
  if (current.dataset.keep !== undefined) return; // its owner draws it
  for (const { name } of [...current.attributes]) {
    if (!wanted.hasAttribute(name) && name !== "style" && !isOwn(current, name)) current.removeAttribute(name);
  }
  for (const { name, value } of wanted.attributes) {
    if (name !== "style" && !isOwn(current, name) && current.getAttribute(name) !== value) current.setAttribute(name, value);
  }
  if (current.style.cssText !== wanted.style.cssText) current.style.cssText = wanted.style.cssText;
  for (const name of HANDLERS) current[name] = wanted[name];
  if (!["INPUT", "SELECT", "TEXTAREA"].includes(current.tagName)) morphChildren(current, wanted);
}

/** `open` of a `details` is its user's. */
function isOwn(element, name) {
  return element.tagName === "DETAILS" && name === "open";
}

export function morphChildren(current, wanted) {
  const byKey = new Map();
  for (const child of current.children) if (child.dataset.key !== undefined) byKey.set(child.dataset.key, child);
  let at = current.firstChild;
  for (const want of [...wanted.childNodes]) {
    const key = want.dataset?.key;
    const have = key === undefined ? at : byKey.get(key);
    if (!have || !isSame(have, want)) {
      current.insertBefore(settle(want), at);
      continue;
    }
    if (have === at) at = at.nextSibling;
    else current.insertBefore(have, at);
    morph(have, want);
  }
  while (at) {
    const gone = at;
    at = at.nextSibling;
    gone.remove();
  }
}

function isSame(have, want) {
  if (have.nodeType !== want.nodeType) return false;
  return have.nodeType === Node.TEXT_NODE || (have.tagName === want.tagName && have.dataset.key === want.dataset.key);
}

/** Say it to who cannot see the page. */
export function announce(text) {
  document.getElementById("announcer").textContent = text;
}
