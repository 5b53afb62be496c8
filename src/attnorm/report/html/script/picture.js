// A head's attention over an image: the picture, dimmed, with every patch lit by the weight of one row.
const PICTURE_SIDE = 288; // CSS pixels of the longer side
const LISTED_PATCHES = 8; // in the table below the picture

// The picture of a head with the number of tokens before its patches; null if the head does not read its patches.
function pictureOf(row) {
  const picture = source.pictures[heads.text[row]];
  if (!picture) return null;
  const before = heads.nHigh[row] - picture.rows * picture.columns;
  return before >= 0 && source.choices.kind[heads.kind[row]] !== "cross" ? { ...picture, before } : null;
}

function patchName(picture, position) {
  const patch = position - picture.before;
  if (patch < 0) return picture.before === 1 ? "class token" : `token ${position} before the patches`;
  return `patch in row ${Math.floor(patch / picture.columns) + 1}, column ${(patch % picture.columns) + 1}`;
}

// The element, and a function that lights the patches of one row of weights.
function pictureBox(picture) {
  const { rows, columns, before } = picture;
  const unit = PICTURE_SIDE / Math.max(rows, columns);
  const size = { width: columns * unit, height: rows * unit };
  const image = () => s("image", { href: picture.png, ...size, preserveAspectRatio: "none" });
  const patches = Array.from({ length: rows * columns }, (_, i) => {
    const corner = { x: (i % columns) * unit, y: Math.floor(i / columns) * unit };
    return s("rect", { class: "patch", ...corner, width: unit, height: unit, "fill-opacity": 0 }, s("title"));
  });
  const query = s("rect", { class: "query-patch", width: unit, height: unit, visibility: "hidden" });
  const label = { role: "img", "aria-label": "The image, patches lit by weight" };
  const frame = { viewBox: `0 0 ${size.width} ${size.height}`, ...size };
  const lit = s("svg", { class: "lit", ...frame, ...label }, image(), s("rect", { class: "dim", ...size }), patches, query);
  const plain = s("svg", { ...frame, role: "img", "aria-label": "The image as the model sees it" }, image());
  const legend = h("figcaption");

  function light(position, weights) {
    const byKey = new Map(weights.map(({ key, weight }) => [key, weight]));
    const values = patches.map((_, i) => byKey.get(i + before) || 0);
    const most = Math.max(...values.map(Math.abs));
    patches.forEach((patch, i) => {
      patch.setAttribute("fill-opacity", most > 0 ? (0.85 * Math.abs(values[i]) / most).toFixed(3) : 0);
      patch.classList.toggle("negative", values[i] < 0);
      patch.firstChild.textContent = `${patchName(picture, i + before)}: weight ${number(values[i])}`;
    });
    const own = position - before;
    query.setAttribute("visibility", own >= 0 ? "visible" : "hidden");
    query.setAttribute("x", (Math.max(own, 0) % columns) * unit);
    query.setAttribute("y", Math.floor(Math.max(own, 0) / columns) * unit);
    const others = weights.filter(({ key }) => key < before).reduce((sum, { weight }) => sum + weight, 0);
    const rest = before ? ` Tokens before the patches: ${number(others)} in all.` : "";
    legend.textContent = `Brightest patch: weight ${number(most)}. An equal share would be ${number(1 / (rows * columns + before))}.${rest}`;
  }
  return { element: h("figure", { class: "picture" }, lit, plain, legend), light };
}
