"use strict";
window.addEventListener("error", event => { document.body.dataset.error = event.message; });
const data = JSON.parse(document.getElementById("data").textContent);
const at = id => document.getElementById(id);
function make(tag, parent, text, name) {
  const element = document.createElement(tag);
  if (text !== undefined) element.textContent = text;
  if (name) element.className = name;
  parent.append(element);
  return element;
}
const number = value => value.toLocaleString("en-US");
const percent = value => (100 * value).toFixed(0) + "%";
function bar(parent, share) {
  make("i", make("div", parent, undefined, "bar")).style.width = 100 * share + "%";
}
at("headline").className = data.dropped || data.layers.some(layer => layer.density !== null) ? "cut" : "dense";
if (data.answers) {
  make("h2", at("answers"), "What follows the prompt");
  make("p", at("answers"), "KL divergence of the next token's odds from dense: " + data.answers.kl.toPrecision(2), "soft");
  const sides = make("div", at("answers"), undefined, "answers");
  for (const side of ["dense", "dropped"]) {
    const box = make("div", sides);
    make("b", box, side);
    data.answers[side].forEach((text, i) => {
      const other = data.answers[side === "dense" ? "dropped" : "dense"][i];
      make(text === other ? "span" : "mark", box, text);
    });
  }
}
let why = () => ""; // set where the slider is: why tokens of a range stayed or went
const painters = []; // by prompt: shows other shares in its map
for (const layer of data.layers) {
  const row = make("tr", at("layers"), undefined, layer.dropped ? "drops" : layer.refused ? "refused" : "");
  row.title = layer.refused || "";
  make("td", row, layer.index, "number");
  make("td", row, layer.attention);
  make("td", row, layer.rows === null ? "" : number(layer.rows), "number");
  const share = make("td", row);
  if (layer.share !== null) bar(share, layer.share);
  const drop = make("td", row, layer.drop || (layer.refused ? "dense: " + layer.refused : ""));
  if (layer.scoring) make("span", drop, " (GFLOP with scoring)", "soft");
  make("td", row, layer.gflop === null ? "" : layer.gflop.toFixed(2), "number");
  make("td", row, layer.dense_gflop === null ? "" : layer.dense_gflop.toFixed(2), "number");
}
if (data.refusals.length) {
  make("h2", at("refused"), "Why something stays dense");
  const list = make("ul", at("refused"));
  for (const reason of data.refusals) make("li", list, reason);
}
data.maps.forEach((map, request) => {
  const many = data.maps.length > 1 ? " of prompt " + (request + 1) : "";
  make("h2", at("maps"), "Tokens" + many + " that each layer computes");
  const legend = make("div", at("maps"), undefined, "legend");
  const swatches = [[1, "all tokens computed"], [0.5, "paler: some of them"], [0, "none"]];
  if (data.layers.some(layer => layer.dropped)) swatches.push([null, "tokens are dropped after this layer"]);
  for (const [share, text] of swatches) {
    const entry = make("span", legend), mark = make("i", entry, undefined, share === null ? "line" : "");
    if (share) make("b", mark).style.opacity = share;
    entry.append(text);
  }
  const grid = make("div", at("maps"), undefined, "map");
  const tip = document.createElement("div");
  tip.id = request ? "tip" + request : "tip";
  tip.textContent = "One row a layer, one column for each " + number(map.width) + " tokens. Point at a cell or click it; then the arrow keys move.";
  tip.setAttribute("aria-live", "polite");
  const steps = { ArrowUp: [-1, 0], ArrowDown: [1, 0], ArrowLeft: [0, -1], ArrowRight: [0, 1] };
  grid.addEventListener("keydown", event => {
    const step = steps[event.key], from = event.target.dataset;
    if (!step || from.column === undefined) return;
    event.preventDefault();
    const row = grid.children[Number(from.layer) + step[0]];
    const cell = row && row.lastChild.children[Number(from.column) + step[1]];
    if (cell) cell.focus();
  });
  map.rows.forEach((cells, layer) => {
    const row = make("div", grid, undefined, data.layers[layer] && data.layers[layer].dropped ? "row drops" : "row");
    make("span", row, layer);
    const strip = make("div", row, undefined, "cells");
    cells.forEach((kept, column) => {
      const cell = make("div", strip, undefined, "cell");
      cell.dataset.layer = layer;
      cell.dataset.column = column;
      cell.dataset.kept = kept;
      make("i", cell).style.opacity = kept;
      cell.tabIndex = layer || column ? -1 : 0; // the tab key enters the map once, and leaves it
      const show = () => {
        const first = column * map.width, last = Math.min(map.tokens, first + map.width);
        tip.textContent = "layer " + layer + ", tokens " + number(first) + " to " + number(last - 1) + ": " +
          percent(Number(cell.dataset.kept)) + " computed" + why(first, last, layer) + (map.texts ? "\n" + map.texts[column] : "");
      };
      cell.addEventListener("mouseenter", show);
      cell.addEventListener("focus", show); // by a click as well
    });
  });
  painters.push(rows => rows.forEach((shares, layer) => shares.forEach((share, column) => {
    const cell = grid.children[layer].lastChild.children[column];
    cell.dataset.kept = share;
    cell.firstChild.style.opacity = share;
  })));
  const axis = make("div", at("maps"), undefined, "axis");
  for (const part of [0, 0.25, 0.5, 0.75, 1]) make("span", axis, number(Math.round(part * map.tokens)));
  at("maps").append(tip);
});
const sparse = data.layers.filter(layer => layer.density !== null);
if (sparse.length) {
  make("h2", at("density"), "Blocks of keys that block-sparse attention computes");
  make("p", at("density"), "Of the blocks that causality allows, over the rows that enter the layer.", "soft");
  const body = make("tbody", make("table", make("div", at("density"), undefined, "scroll")));
  for (const layer of sparse) {
    const row = make("tr", body);
    make("td", row, "layer " + layer.index);
    make("td", row, percent(layer.density), "number");
    bar(make("td", row), layer.density);
  }
}
const longest = Math.max(...data.passes.map(([, seconds]) => seconds), 1e-9);
for (const [name, seconds] of data.passes) {
  const row = make("tr", at("passes"));
  make("td", row, name);
  make("td", row, seconds.toFixed(3) + " s", "number");
  bar(make("td", row), seconds / longest);
}
for (const [name, code] of data.graphs) {
  const block = make("details", at("graphs"));
  make("summary", block, name);
  make("pre", block, code);
}
