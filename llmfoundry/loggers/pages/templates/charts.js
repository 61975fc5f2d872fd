/* The report's line charts, drawn by uPlot from the JSON beside each (charts.py); loads nothing.

   A zoom along the x axis is the zoom of all charts, so that they can be compared at a glance. Zoom,
   smoothing, log axes, folds and place on the page outlive a reload, and the page of a run that is
   under way reloads itself, as a file of a disk can read no other. */
(() => {
  "use strict";
  const HEIGHT = 240, COLORS = 10, DASHES = [[], [6, 3], [2, 3]], RELOAD = 15_000, STALE = 3_600_000;
  const view = {from: null, to: null, smoothing: 2, logs: {}, axis: "tokens"}; /* along the axis; percent of the run */
  const charts = [];
  const color = (name) => getComputedStyle(document.documentElement).getPropertyValue(name);
  const line = (i) => () => color(`--s${i % COLORS}`);

  /* Numbers as console.py writes them. */
  const trimmed = (text) => text.replace(/(\.\d*?)0+$/, "$1").replace(/\.$/, "");
  const number = (value, digits = 4) => {
    if (value === 0) return "0";
    const size = Math.abs(value);
    if (size < 1e-3 || size >= 1e6) {
      const [mantissa, power] = value.toExponential(digits - 1).split("e");
      return `${mantissa.includes(".") ? trimmed(mantissa) : mantissa}e${power[0]}${power.slice(1).padStart(2, "0")}`;
    }
    const text = Number(value.toPrecision(digits)).toFixed(Math.max(0, digits - 1 - Math.floor(Math.log10(size))));
    return text.includes(".") ? trimmed(text) : text;
  };
  const count = (value) => {
    if (Math.abs(value) < 999.5) return Number.isInteger(value) ? String(value) : number(value, 3);
    const step = Math.min(6, Math.floor(Math.log10(Math.abs(value) * 1.0005) / 3));
    const scaled = value / 1000 ** step, size = Math.abs(scaled);
    return scaled.toFixed(size < 9.995 ? 2 : size < 99.95 ? 1 : 0) + ["", "k", "M", "G", "T", "P", "E"][step];
  };
  const size = (gib) => gib * 1024 < 999.5 ? `${(gib * 1024).toFixed(0)} MiB`
    : gib < 999.95 ? `${gib.toFixed(1)} GiB` : `${(gib / 1024).toFixed(1)} TiB`;
  const FORMS = {number, count, size, tenth: (value) => value.toFixed(1)};
  const round = (text) => text.replace(/^(-?\d+)\.(\d*?)0*(\D*)$/, (_, whole, part, unit) => whole + (part && "." + part) + unit);
  /* Labels of an axis, all alike: 5k beside 10k. */
  const ticks = (u, at) => {
    const short = at.some((value) => Math.abs(value) >= 1e4);
    const text = (value) => short && value ? round(count(value)) : number(Number(value.toPrecision(6)), 6);
    return at.map((value) => value === null ? "" : text(value));
  };

  /* The mean of what is finite as far to both sides as there is room. */
  function movingMean(values, window) {
    const totals = [0], counts = [0];
    values.forEach((v, i) => {
      totals.push(totals[i] + (v ?? 0));
      counts.push(counts[i] + (v !== null));
    });
    return values.map((_, i) => {
      const reach = Math.min(window >> 1, i, values.length - 1 - i);
      const held = counts[i + reach + 1] - counts[i - reach];
      return held ? (totals[i + reach + 1] - totals[i - reach]) / held : null;
    });
  }

  class Chart {
    constructor(figure, data) {
      Object.assign(this, {figure, data, form: FORMS[data.form], plot: null});
      this.title = figure.querySelector("figcaption b").textContent;
      this.place = figure.querySelector(".plot");
      this.place.tabIndex = 0;
      this.tip = this.add("div", "tip", figure);
      this.tip.hidden = true;
      this.above = this.add("span", "hint above", figure.querySelector("figcaption"));
      this.addLog(data.lines.every((one) => (one.low ?? one.y).every((v) => v === null || v > 0)));
      this.place.onkeydown = (event) => this.key(event);
    }

    /* Place the points along the axis that is chosen. */
    placeAlong() {
      const {ends, lines} = this.data;
      if (!ends) return;
      this.data.end = ends[view.axis];
      lines.forEach((one) => { one.x = one.axes[view.axis]; });
    }

    add(tag, kind, parent) {
      const made = parent.appendChild(document.createElement(tag));
      made.className = kind;
      return made;
    }

    get log() { return this.mayLog && (view.logs[this.title] ?? this.data.log); }

    addLog(mayLog) {
      this.mayLog = mayLog;
      if (!mayLog) return;
      const button = this.add("button", "", this.figure.querySelector("figcaption"));
      const show = () => button.setAttribute("aria-pressed", this.log);
      button.textContent = "log axis";
      button.onclick = () => {
        view.logs[this.title] = !this.log;
        show();
        this.draw();
      };
      show();
    }

    /* Of each line: its values, least and greatest of a stretch, and what is drawn bold. */
    columns() {
      return uPlot.join(this.data.lines.map((one) => {
        const window = 2 * Math.round(one.x.length * view.smoothing / 200) + 1;
        const isSmooth = this.data.smooth && window > 1 && one.x.length >= 40;
        one.bold = isSmooth ? movingMean(one.y, window) : one.y;
        one.faint = isSmooth || Boolean(one.low);
        return [one.x, one.y, one.low ?? one.y, one.high ?? one.y, one.bold];
      }));
    }

    series() {
      return [{}, ...this.data.lines.flatMap((one, i) => {
        const drawn = {stroke: line(i), dash: DASHES[Math.floor(i / COLORS) % DASHES.length]};
        const unseen = {stroke: null, width: 0, points: {show: false}};
        const faint = one.faint && !one.low ? {...drawn, width: 1, alpha: .32, points: {show: false}} : unseen;
        const edge = one.low ? {...drawn, width: 1, alpha: .32, points: {show: false}} : unseen;
        return [faint, edge, edge, {...drawn, width: 1.8, points: {size: 5, fill: line(i), filter: alone}}];
      })];
    }

    /* Least and greatest y: a line's steep beginning runs out of the frame unless it is zoomed into. */
    range() {
      const from = view.from ?? 0, to = view.to ?? this.data.end;
      const seen = (skip) => this.data.lines.flatMap((one) => one.x.flatMap((x, i) =>
        x < Math.max(from, skip * one.x.at(-1)) || x > to || one.y[i] === null ? [] : [(one.low ?? one.y)[i], (one.high ?? one.y)[i]]));
      const limits = (values) => values.reduce(([a, b], v) => [Math.min(a, v), Math.max(b, v)], [Infinity, -Infinity]);
      const all = seen(0), framed = view.from === null && this.data.skip ? seen(this.data.skip) : all;
      let [low, high] = limits(framed.length >= 40 ? framed : all);
      if (!(low <= high)) [low, high] = [0, 1];
      const margin = high - low > 1e-12 * Math.max(Math.abs(low), Math.abs(high)) ? 0.05 * (high - low) : Math.abs(high) * 0.1 || 1;
      let frame = [low - margin, high + margin];
      if (this.log) frame = [low / 1.1, high * 1.1];
      else if (this.data.zero) frame = [Math.min(low, 0) && low - margin, Math.max(high, 0) + margin];
      const [, highest] = limits(all);
      this.above.textContent = highest > frame[1] ? `begins above the frame, at ${this.form(highest)}` : "";
      return frame;
    }

    draw() {
      const width = this.place.clientWidth;
      this.plot?.destroy();
      this.plot = null;
      if (width < 80) return; /* in a folded group */
      this.placeAlong();
      const data = this.columns(), axis = {stroke: () => color("--dim"), font: "11px system-ui, sans-serif"};
      const base = {show: true, stroke: () => color("--dim"), width: 1};
      this.plot = new uPlot({
        width, height: HEIGHT, padding: [8, 16, 0, 0],
        legend: {show: false},
        cursor: {y: false, drag: {x: true, y: false, setScale: false}, dataIdx: filled, bind: {dblclick: () => () => zoom(null, null)},
          points: {show: (u, i) => i % 4 === 0, size: 7, fill: (u, i) => line(i / 4 - 1)(), stroke: (u, i) => line(i / 4 - 1)()}},
        scales: {x: {time: false, range: () => [view.from ?? 0, view.to ?? this.data.end]},
          y: {distr: this.log ? 3 : 1, range: () => this.range()}},
        axes: [{...axis, size: 30, space: 70, grid: {show: false}, ticks: {...base, size: 4}, border: base, values: ticks},
          {...axis, size: 56, grid: {stroke: () => color("--line"), width: 1}, ticks: {show: false}, values: ticks}],
        series: this.series(),
        bands: this.data.lines.flatMap((one, i) => one.low ? [{series: [4 * i + 3, 4 * i + 2], fill: () => shade(line(i)())}] : []),
        hooks: {draw: [(u) => this.marks(u)], setCursor: [(u) => this.tell(u)], setSelect: [(u) => this.pick(u)]},
      }, data, this.place);
      touch(this.plot.over);
    }

    /* Where something happened to the run: a line, and the kind of event along it where there is room. */
    marks(u) {
      const ratio = devicePixelRatio, height = 12 * ratio;
      let free = -Infinity; /* where the next label may be */
      u.ctx.save();
      u.ctx.strokeStyle = u.ctx.fillStyle = color("--s4");
      u.ctx.lineWidth = 1.5 * ratio;
      u.ctx.font = `${10 * ratio}px sans-serif`;
      u.ctx.textAlign = "right";
      u.ctx.setLineDash([4, 4]);
      for (const mark of this.seenMarks(u)) {
        const x = u.valToPos(mark.x, "x", true);
        u.ctx.beginPath();
        u.ctx.moveTo(x, u.bbox.top);
        u.ctx.lineTo(x, u.bbox.top + u.bbox.height);
        u.ctx.stroke();
        if (x < Math.max(free, u.bbox.left + height)) continue;
        u.ctx.save();
        u.ctx.translate(x - 4 * ratio, u.bbox.top + 2 * ratio);
        u.ctx.rotate(-Math.PI / 2);
        u.ctx.fillText(mark.what.split(":")[0].replaceAll("_", " "), 0, 0);
        u.ctx.restore();
        free = x + height;
      }
      u.ctx.restore();
    }

    seenMarks(u) { return (this.data.marks ?? []).filter((mark) => mark.x >= u.scales.x.min && mark.x <= u.scales.x.max); }

    /* The values where the pointer is, and what happened there. */
    tell(u) {
      const {left, idx} = u.cursor;
      this.tip.hidden = left < 0 || idx === null || idx === undefined;
      if (this.tip.hidden) return;
      const at = u.data[0][idx];
      this.tip.replaceChildren();
      this.add("div", "", this.tip).textContent = `${count(at)} ${view.axis}`;
      this.data.lines.forEach((one, i) => {
        const k = one.x.indexOf(u.data[0][u.cursor.idxs[4 * i + 4] ?? idx]);
        if (k < 0) return;
        const isOneOfMany = this.data.lines.length > 4, name = one.label || this.title;
        const row = this.add("div", isOneOfMany ? "cut" : "", this.tip);
        this.add("i", "", row).style.background = `var(--s${i % COLORS})`;
        if (!isOneOfMany) row.append(`${name}: `);
        this.add("b", "", row).textContent = one.y[k] === null ? "not finite" : this.form(one.y[k]);
        if (one.low && one.y[k] !== null) row.append(` (${this.form(one.low[k])} to ${this.form(one.high[k])})`);
        if (one.bold !== one.y && one.bold[k] !== null) row.append(`, smoothed ${this.form(one.bold[k])}`);
        if (isOneOfMany) row.append(` ${name}`);
      });
      for (const mark of this.seenMarks(u)) {
        if (Math.abs(u.valToPos(mark.x, "x") - left) < 6) this.add("div", "event", this.tip).textContent = mark.what;
      }
      const edge = u.over.offsetLeft + this.place.offsetLeft, x = edge + u.valToPos(at, "x");
      const room = this.figure.clientWidth - this.tip.offsetWidth - 6;
      this.tip.style.left = `${Math.max(6, x + 14 < room ? x + 14 : Math.min(room, x - this.tip.offsetWidth - 14))}px`;
      this.tip.style.top = `${this.place.offsetTop + 12}px`;
    }

    pick(u) {
      const {left, width} = u.select;
      if (width <= 0) return;
      u.setSelect({left: 0, width: 0, top: 0, height: 0}, false);
      if (width > 8) zoom(u.posToVal(left, "x"), u.posToVal(left + width, "x"), this.data.end);
    }

    key(event) {
      const step = {ArrowLeft: -1, ArrowRight: 1}[event.key], u = this.plot;
      if (event.key === "Escape") {
        zoom(null, null);
        u?.setCursor({left: -10, top: -10});
      } else if (step && u) {
        const k = Math.max(0, Math.min(u.data[0].length - 1, (u.cursor.idx ?? -1) + step));
        u.setCursor({left: u.valToPos(u.data[0][k], "x"), top: 10});
        event.preventDefault();
      }
    }
  }

  const shade = (text) => /^#[\da-f]{6}$/i.test(text.trim()) ? `${text.trim()}40` : "transparent";

  /* Points are marked where there are few, or where one stands alone between gaps. */
  function alone(u, s, show, gaps) {
    const values = u.data[s].flatMap((v, i) => v === undefined ? [] : [[v, i]]);
    const few = values.length <= 20;
    return values.filter(([v], k) => v !== null && (few || (values[k - 1]?.[0] ?? null) === null && (values[k + 1]?.[0] ?? null) === null)).map(([, i]) => i);
  }

  /* Of a line that has no value at the place of the pointer: the nearest that it has. */
  function filled(u, s, at) {
    const values = u.data[s];
    for (let far = 0; far < values.length; far++) {
      if (values[at - far] !== undefined) return at - far;
      if (values[at + far] !== undefined) return at + far;
    }
    return at;
  }

  /* Fingers zoom as a mouse does; up and down they scroll. */
  function touch(over) {
    const kinds = {pointerdown: ["mousemove", "mousedown"], pointermove: ["mousemove"], pointerup: ["mouseup"]};
    for (const [kind, mice] of Object.entries(kinds)) {
      over.addEventListener(kind, ({pointerType, clientX, clientY}) => {
        if (pointerType !== "touch") return;
        const place = {clientX, clientY, movementX: 1, button: 0, bubbles: true, view: window};
        mice.forEach((name) => over.dispatchEvent(new MouseEvent(name, place)));
      });
    }
  }

  const drawAll = () => charts.forEach((chart) => chart.draw());

  function zoom(from, to, end) {
    view.from = from === null ? null : Math.max(0, from);
    view.to = to === null ? null : Math.min(end, to);
    showZoom();
    drawAll();
  }

  function showZoom() {
    document.querySelectorAll(".tools .whole").forEach((button) => { button.disabled = view.from === null; });
    document.body.classList.toggle("zoomed", view.from !== null);
  }

  function addTools(heading) {
    const tools = document.createElement("div");
    tools.className = "tools";
    const axes = Object.keys(charts[0].data.ends ?? {tokens: 0}).map((name) => `<option>${name}</option>`).join("");
    tools.innerHTML = '<label>smoothing <input type="range" min="0" max="20" step="1"><output></output></label>'
      + '<button class="whole" disabled>whole run</button>'
      + `<span>along the bottom: ${axes.includes("steps") ? `<select>${axes}</select>` : "tokens"}; drag across a chart to zoom, double-click to leave</span>`;
    const select = tools.querySelector("select");
    if (select) {
      select.value = view.axis;
      select.onchange = () => { view.axis = select.value; zoom(null, null); };
    }
    const [slider, output] = [tools.querySelector("input"), tools.querySelector("output")];
    const tell = () => { output.textContent = view.smoothing ? `${view.smoothing}% of the run` : "none"; };
    slider.value = view.smoothing;
    slider.oninput = () => { view.smoothing = Number(slider.value); tell(); drawAll(); };
    tools.querySelector(".whole").onclick = () => zoom(null, null);
    tell();
    heading.after(tools);
  }

  /* What a reload keeps. */
  const KEY = `llmfoundry ${location.pathname}`, folds = () => [...document.querySelectorAll("details")];
  const name = (fold) => `${fold.closest("section").querySelector("h2").textContent}: ${fold.querySelector("summary").firstChild.textContent.trim()}`;
  function save() {
    const open = Object.fromEntries(folds().map((fold) => [name(fold), fold.open]));
    try { sessionStorage.setItem(KEY, JSON.stringify({view, open, top: scrollY})); } catch { /* it is off */ }
  }
  function restore() {
    let kept = null;
    try { kept = JSON.parse(sessionStorage.getItem(KEY)); } catch { /* it is off */ }
    if (!kept) return null;
    Object.assign(view, kept.view);
    folds().forEach((fold) => { fold.open = kept.open[name(fold)] ?? fold.open; });
    return kept.top;
  }

  /* Parallel coordinates: the values of the run whose line is pointed at or tapped. */
  for (const one of document.querySelectorAll(".one")) {
    const figure = one.closest("figure");
    const tip = figure.querySelector(":scope > .tip") ?? figure.appendChild(document.createElement("div"));
    Object.assign(tip, {className: "tip", hidden: true});
    one.onpointermove = one.onpointerdown = ({clientX, clientY}) => {
      const box = figure.getBoundingClientRect();
      tip.replaceChildren(...one.dataset.words.split("\n").map((text) => Object.assign(document.createElement("div"), {textContent: text})));
      tip.firstChild.prepend(Object.assign(document.createElement("i"), {style: `background:${one.dataset.color}`}));
      tip.hidden = false;
      const room = figure.clientWidth - tip.offsetWidth - 6, x = clientX - box.left + 14;
      tip.style.left = `${Math.max(6, Math.min(x, room))}px`;
      tip.style.top = `${clientY - box.top + 16}px`;
    };
    one.onpointerleave = () => { tip.hidden = true; };
  }

  const top = restore();
  for (const element of document.querySelectorAll('figure script[type="application/json"]')) {
    charts.push(new Chart(element.parentElement, JSON.parse(element.textContent)));
  }
  if (charts.length) addTools(charts[0].figure.closest("section").querySelector("h2"));
  showZoom();
  drawAll();
  if (top !== null) {
    history.scrollRestoration = "manual";
    scrollTo(0, top);
  }
  let width = innerWidth;
  document.addEventListener("toggle", (event) => charts.forEach((chart) => event.target.contains(chart.figure) && chart.draw()), true);
  window.addEventListener("resize", () => { if (innerWidth !== width) { width = innerWidth; drawAll(); } });
  window.addEventListener("pagehide", save);
  window.matchMedia("(prefers-color-scheme: dark)").addEventListener("change", drawAll);

  const written = Number(document.body.dataset.written); /* of a run under way */
  if (written) setInterval(() => {
    const isUsed = document.hidden || [...document.querySelectorAll(".tip")].some((tip) => !tip.hidden);
    if (!isUsed && Date.now() - written < STALE) location.reload();
  }, RELOAD);
})();
