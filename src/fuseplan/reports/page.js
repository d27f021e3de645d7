// Draws the edges between the boxes of the graph, again whenever a box unfolds or the window changes.
"use strict";
const graph = document.getElementById("graph");
const lines = graph.querySelector("svg");

function draw() {
  const origin = graph.getBoundingClientRect();
  const dx = graph.scrollLeft - origin.left, dy = graph.scrollTop - origin.top;
  const paths = [];
  for (const box of graph.querySelectorAll(".box")) {
    const to = box.getBoundingClientRect();
    for (const name of box.dataset.reads.split(" ").filter(Boolean)) {
      const maker = document.getElementById(name), from = maker.getBoundingClientRect();
      const ranks = box.parentElement.dataset.rank - maker.parentElement.dataset.rank;
      if (ranks === 1) {
        const x0 = from.left + from.width / 2 + dx, y0 = from.bottom + dy;
        const x1 = to.left + to.width / 2 + dx, y1 = to.top + dy, bend = (y1 - y0) / 2;
        paths.push(`<path d="M${x0} ${y0}C${x0} ${y0 + bend} ${x1} ${y1 - bend} ${x1} ${y1}"/>`);
      } else {
        const x0 = from.right + dx, y0 = (from.top + from.bottom) / 2 + dy;
        const x1 = to.right + dx, y1 = (to.top + to.bottom) / 2 + dy;
        const bow = Math.max(x0, x1) + Math.min(100, 20 + 6 * ranks);
        paths.push(`<path class="skip" d="M${x0} ${y0}C${bow} ${y0} ${bow} ${y1} ${x1} ${y1}"/>`);
      }
    }
  }
  lines.setAttribute("width", graph.scrollWidth);
  lines.setAttribute("height", graph.scrollHeight);
  lines.innerHTML = paths.join("");
}

graph.addEventListener("toggle", draw, true);
new ResizeObserver(draw).observe(graph);
draw();
