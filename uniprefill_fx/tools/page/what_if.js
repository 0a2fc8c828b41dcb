// What another p would keep: the selection of the package (arXiv 2605.06221, Eq. 5) on the stored block scores.
const w = data.what_if;

// Tokens alive before each drop and after the last: sorted arrays, counted from the prompt's first token. ps: null for
// the run as it was. shares[j]: by token, its part of the attention at the j-th drop.
function selected(ps) {
  let alive = Array.from({ length: w.tokens }, (_, t) => t);
  const levels = [alive], shares = [];
  w.layers.forEach((_, j) => {
    const size = w.block_size, scores = w.scores[j], blocks = Math.ceil(alive.length / size);
    const each = t => scores[Math.floor(t / size)] / Math.min(size, w.tokens - Math.floor(t / size) * size);
    let masses = new Array(blocks).fill(0);
    if (alive.length === w.tokens) masses = scores.slice();
    else alive.forEach((t, row) => { masses[Math.floor(row / size)] += each(t); });
    const total = masses.reduce((a, b) => a + b, 0);
    const share = new Float64Array(w.tokens);
    for (const t of alive) share[t] = each(t) / total;
    shares.push(share);
    if (ps === null) {
      alive = w.kept[j].flatMap(([a, b]) => Array.from({ length: b - a }, (_, i) => a + i));
    } else {
      const order = masses.map((_, b) => b).sort((a, b) => masses[b] - masses[a] || a - b);
      const stays = new Array(blocks).fill(false);
      let above = 0;
      for (const b of order) {
        if (above >= ps[j] * total && ps[j] !== 1) break;
        stays[b] = true;
        above += masses[b];
      }
      const rows = alive.length;
      alive = alive.filter((_, row) =>
        stays[Math.floor(row / size)] || row < w.sink_tokens || row >= rows - w.last_n);
    }
    levels.push(alive);
  });
  return { ps, levels, shares };
}

function pairs(cost, positions) {
  const n = positions.length, back = cost.window, chunk = cost.chunk;
  if (back === null && chunk === null) return n * (n + 1) / 2;
  let first = 0, seen = 0;
  for (let i = 0; i < n; i++) {
    const from = back !== null ? positions[i] - back + 1 : Math.floor(positions[i] / chunk) * chunk;
    while (positions[first] < from) first++;
    seen += i + 1 - first;
  }
  return seen;
}

function flops(levels, dense) {
  let sum = 0;
  for (const cost of w.costs) {
    const own = levels[dense ? 0 : cost.level], rows = dense || !cost.level ? w.columns : own.length;
    const part = !dense && cost.full ? w.density[cost.layer] ?? 1 : 1;
    sum += cost.each * rows + cost.fixed + (cost.pair ? part * cost.pair * pairs(cost, own) : 0);
    if (!dense) sum += cost.scoring * Math.min(w.last_n, own.length) * own.length;
  }
  return sum;
}

function cached(levels) {
  const bytes = level => w.stores.reduce((sum, store) => {
    const at = level ?? store.level, rows = at ? levels[at].length : w.columns;
    return sum + store.each * (store.most === null ? rows : Math.min(rows, store.most));
  }, 0);
  return bytes() / bytes(0);
}

if (w) {
  at("whatif").hidden = false;
  const text = at("text"), pieces = [];
  if (w.text) {
    at("texts").hidden = false;
    w.text.forEach((part, i) => {
      const piece = make("span", text, part);
      const show = () => {
        piece.title = "last seen by layer " + piece.dataset.last + why(w.first + i * w.segment, w.first + (i + 1) * w.segment);
      };
      piece.addEventListener("mouseenter", show);
      piece.addEventListener("click", () => { show(); at("tip").textContent = piece.title; });
      pieces.push(piece);
    });
  }
  const asRun = selected(null), everything = selected(w.layers.map(() => 1));
  const dense = flops(everything.levels, true);
  const measured = [everything, asRun].map(state => flops(state.levels, false));
  const saved = share => percent(Math.round(100 * share) / 100 + 0);
  let now = asRun;

  why = (from, past, layer) => {
    const lines = w.layers.filter(own => layer === undefined || own < layer).map(own => {
      const j = w.layers.indexOf(own), before = now.levels[j], after = new Set(now.levels[j + 1]);
      let part = 0, here = 0, left = 0, sink = false, recent = false;
      before.forEach((t, row) => {
        if (t + w.first < from || t + w.first >= past) return;
        here++;
        part += now.shares[j][t];
        if (!after.has(t)) return;
        left++;
        sink ||= row < w.sink_tokens;
        recent ||= row >= before.length - w.last_n;
      });
      if (!here) return "";
      const how = !left ? "dropped" : left === here ? "stayed" : left + " of " + here + " tokens stayed";
      const first = sink ? "; the first " + w.sink_tokens + " always stay" : "";
      const last = recent ? "; the last " + w.last_n + " always stay" : "";
      return "\nafter layer " + own + ": " + (100 * part).toFixed(2) + "% of the attention, " + how + first + last;
    });
    return lines.join("");
  };

  const paint = state => {
    now = state;
    const used = flops(state.levels, false), [most, ran] = measured, [whole, once] = w.seconds;
    at("compute").textContent = saved(1 - used / dense);
    at("cache").textContent = saved(1 - cached(state.levels));
    at("left").textContent = saved(1 - state.levels.at(-1).length / w.tokens);
    const seconds = ran < most ? whole + (used - most) * (once - whole) / (ran - most) : whole;
    at("time").textContent = saved(1 - Math.max(0, seconds) / whole);
    at("timed").textContent = "of the time saved: " + Math.max(0, seconds).toFixed(2) + " s instead of " + whole.toFixed(2) +
      " s, between two runs that were timed here";
    at("chosen").textContent = state.ps === null ? "as it was" : [...new Set(state.ps)].join(", ");
    for (const button of at("presets").children) {
      button.setAttribute("aria-pressed", button.dataset.p === JSON.stringify(state.ps));
    }
    const last = new Array(w.tokens).fill(data.layers.length - 1);
    w.layers.toReversed().forEach((layer, back) => {
      const j = w.layers.length - 1 - back, after = new Set(state.levels[j + 1]);
      for (const t of state.levels[j]) if (!after.has(t)) last[t] = layer;
    });
    pieces.forEach((piece, i) => {
      piece.dataset.last = Math.max(...last.slice(i * w.segment, (i + 1) * w.segment));
      const survived = w.layers.filter(layer => layer < Number(piece.dataset.last)).length;
      const strength = Math.round(6 + 40 * survived / w.layers.length);
      piece.style.background = "color-mix(in srgb, var(--keep) " + strength + "%, transparent)";
    });
    const map = data.maps[0], columns = map.rows[0].length;
    const shares = state.levels.map((alive, level) => {
      const counts = new Array(columns).fill(0);
      for (const t of alive) counts[Math.floor((t + w.first) / map.width)]++;
      return counts.map((count, c) => level ? count / Math.min(map.width, map.tokens - c * map.width) : 1);
    });
    painters[0](data.layers.map((_, layer) => shares[w.layers.filter(own => own < layer).length]));
  };
  const preset = (name, ps) => {
    const button = make("button", at("presets"), name);
    button.dataset.p = JSON.stringify(ps);
    button.addEventListener("click", () => {
      if (ps) at("p").value = ps[0];
      paint(ps === null ? asRun : selected(ps));
    });
  };
  preset("as it was", null);
  for (const { name, p } of w.presets) preset(name, p);
  at("p").addEventListener("input", event => paint(selected(w.layers.map(() => Number(event.target.value)))));
  at("p").value = w.p;
  paint(asRun);
}
