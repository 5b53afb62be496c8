// Which tokens a head reads: the text with the keys of one row shaded by their weight, and the same as a table.
const WHOLE_TEXT = 1200; // tokens; of longer texts, only parts around the listed keys are shown
const AROUND = 8;
let readRow = null; // the row that was chosen last; it stays when the head changes

const texts = new Map(source.tokens.map((one) => [`${one.text}|${one.length}|${one.side}`, one.tokens]));

function tokensOf(row, part) {
  const sides = source.sides.kinds[source.choices.kind[heads.kind[row]]];
  const key = `${heads.text[row]}|${heads.length[row]}`;
  return (sides && texts.get(`${key}|${sides[part]}`)) || texts.get(`${key}|${source.sides.input}`) || null;
}

// Row position -> its keys and weights, the heaviest first.
function readsByRow(row) {
  const [positions, keys, weights] = ["row", "key", "weight"].map((name) => curve(row, "reads", name));
  const found = new Map();
  positions.forEach((position, i) => {
    if (!found.has(position)) found.set(position, []);
    found.get(position).push({ key: keys[i], weight: weights[i] });
  });
  return found;
}

function readsOf(row) {
  const picture = pictureOf(row);
  const title = h("h4", { id: "reads-title" }, picture ? "Where it looks" : "Which tokens it reads");
  const section = h("section", { class: "reads", "aria-labelledby": "reads-title" }, title);
  const found = readsByRow(row);
  if (!found.size) {
    const measured = Object.keys(source.reads.columns).length > 0;
    const why = measured ? "This head has no row with finite weights other than 0." : notMeasured("--tokens 8");
    section.append(h("p", { class: "empty" }, why));
    return section;
  }
  const rows = [...found.keys()];
  const names = picture && { length: heads.nHigh[row], name: (position) => patchName(picture, position) };
  const queries = names || tokensOf(row, 0);
  const keys = names || tokensOf(row, 1);
  const drawn = picture && pictureBox(picture);
  const together = queries === keys; // in cross-attention rows and keys belong to two texts
  const elements = keys && !picture ? textElements(keys, found, together) : new Map();
  const body = h("tbody");
  const caption = h("caption");
  const chips = new Map(rows.map((position) => [position, chip(position, queries, () => pin(position), () => reveal(position))]));
  let box = null; // of the text

  function show(position) {
    for (const element of elements.values()) unshade(element);
    for (const { key, weight } of found.get(position)) shade(elements.get(key), key, weight);
    for (const [one, element] of elements) element.classList.toggle("reader", together && one === position);
    for (const [one, element] of chips) element.setAttribute("aria-pressed", String(one === position));
    caption.replaceChildren(`Row ${number(position)} `, quotedToken(queries, position), " reads");
    const listed = picture ? found.get(position).slice(0, LISTED_PATCHES) : found.get(position);
    body.replaceChildren(...listed.map((one, i) => readLine(one, i, keys)));
    if (drawn) drawn.light(position, found.get(position));
  }
  function reveal(position) {
    show(position);
    const heaviest = elements.get(found.get(position)[0].key);
    if (box && heaviest) box.scrollTop = heaviest.offsetTop - box.clientHeight / 2;
  }
  function pin(position) {
    readRow = position;
    show(position);
  }
  const first = () => (found.has(readRow) ? readRow : rows[picture ? 0 : rows.length - 1]);
  const fewer = source.reads.left_out ? ` The table “reads” has ${count(source.reads.left_out, "more key")} per row.` : "";
  const shown = picture ? "brighter patches" : "darker keys";
  const note = `A row is the query of one token. Point at a row to see its keys; ${shown} have more weight. Click to keep it.${fewer}`;
  const head = ["", "Key", picture ? "Patch" : "Token", "Weight"].map((label) => h("th", { scope: "col", class: /Token|Patch/.test(label) ? "words" : null }, label));
  if (drawn) box = drawn.element;
  else if (keys) box = textBox(elements, keys, { show, pin, first, readers: together ? found : new Map() });
  section.append(
    h("p", { class: "note" }, note),
    h("div", { class: "read-rows", role: "group", "aria-label": "Rows", onpointerleave: () => show(first()) }, [...chips.values()]),
    box || "",
    h("div", { class: "scroll" }, h("table", { class: "numbers read-keys" }, caption, h("thead", null, h("tr", null, head)), body)),
  );
  show(first());
  requestAnimationFrame(() => reveal(first())); // once it is in the page and has a height
  return section;
}

function chip(position, queries, pin, show) {
  const attributes = { type: "button", class: "chip", "aria-pressed": "false", "data-position": position };
  return h("button", { ...attributes, onclick: pin, onfocus: show, onpointerenter: show }, `${number(position)} `, quotedToken(queries, position));
}

function quotedToken(tokens, position) {
  if (tokens && tokens.name) return tokens.name(position); // patches of an image
  return tokens ? h("bdi", { class: "quoted" }, `‘${tokens[position]}’`) : source.inputName === "Image" ? "" : "(no text)";
}

function readLine({ key, weight }, index, tokens) {
  const token = h("td", { class: "words" }, quotedToken(tokens, key));
  return h("tr", null, h("td", null, String(index + 1)), h("td", null, number(key)), token, h("td", null, number(weight)));
}

// One element for each position that is shown.
function textElements(tokens, found, together) {
  const wanted = new Set();
  const around = (position) => {
    for (let at = Math.max(0, position - AROUND); at <= Math.min(tokens.length - 1, position + AROUND); at += 1) wanted.add(at);
  };
  if (tokens.length <= WHOLE_TEXT) tokens.forEach((_, position) => wanted.add(position));
  for (const [position, keys] of found) {
    if (together) around(position);
    for (const { key } of keys) around(key);
  }
  const positions = [...wanted].sort((a, b) => a - b);
  return new Map(
    positions.map((position) => {
      const query = together && found.has(position);
      return [position, h("bdi", { class: query ? "token query" : "token", "data-position": position }, tokens[position])];
    }),
  );
}

function textBox(elements, tokens, { show, pin, first, readers }) {
  const label = { tabindex: 0, role: "region", "aria-label": "The text, keys shaded by weight" };
  const box = h("div", { class: "read-text", ...label });
  let before = -1;
  for (const [position, element] of elements) {
    if (position > before + 1) box.append(h("span", { class: "left-out" }, ` … ${count(position - before - 1, "token")} … `));
    box.append(element);
    if (tokens[position].includes("⏎")) box.append(h("br"));
    before = position;
  }
  if (before < tokens.length - 1) box.append(h("span", { class: "left-out" }, ` … ${count(tokens.length - 1 - before, "token")}`));
  const readerUnder = (event) => {
    const element = event.target.closest(".token");
    const position = element ? Number(element.dataset.position) : -1;
    return readers.has(position) ? position : -1;
  };
  box.addEventListener("pointerover", (event) => readerUnder(event) >= 0 && show(readerUnder(event)));
  box.addEventListener("pointerleave", () => show(first()));
  box.addEventListener("click", (event) => readerUnder(event) >= 0 && pin(readerUnder(event)));
  return box;
}

// The square root makes small weights visible; text stays readable on the darkest color.
function shade(element, key, weight) {
  if (!element) return;
  element.classList.add("read");
  element.style.setProperty("--share", `${(60 * Math.sqrt(Math.min(Math.abs(weight), 1))).toFixed(1)}%`);
  element.title = `key ${key}: weight ${number(weight)}`;
}

function unshade(element) {
  if (!element.classList.contains("read")) return;
  element.classList.remove("read");
  element.style.removeProperty("--share");
  element.removeAttribute("title");
}
