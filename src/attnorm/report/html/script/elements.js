// Elements by their tag; text is always text, never markup.
const SVG = "http://www.w3.org/2000/svg";

function filled(element, attributes, children) {
  for (const [name, value] of Object.entries(attributes || {})) {
    if (value === null || value === undefined || value === false) continue;
    if (name.startsWith("on")) element.addEventListener(name.slice(2), value);
    else element.setAttribute(name, value === true ? "" : value);
  }
  element.append(...children.flat().filter((child) => child !== null && child !== undefined && child !== false));
  return element;
}

function h(tag, attributes, ...children) {
  return filled(document.createElement(tag), attributes, children);
}

function s(tag, attributes, ...children) {
  return filled(document.createElementNS(SVG, tag), attributes, children);
}

function notMeasured(option) {
  return ["Not measured. Run the analysis with ", h("code", null, option), "."];
}

function verdictClass(word) {
  return /^[a-z-]+$/.test(word.name) ? `v-${word.name}` : "v-unknown";
}

function mark(word) {
  return h("span", { class: `mark ${verdictClass(word)}`, "aria-hidden": "true" }, word.mark);
}

function announce(text) {
  document.getElementById("announce").textContent = text;
}
