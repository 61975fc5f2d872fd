/* Charts that can be zoomed, read and smoothed; written into report.html, loads nothing.

   Each <figure> with a chart has a picture, for readers without scripts, and a JSON element with its
   numbers (chart_data.py). Here the picture is drawn anew from the numbers at the figure's own width.
   A zoom along the x axis is the zoom of all charts, so that they can be compared at a glance. */
(() => {
  "use strict";
  const HEIGHT = 240, LEFT = 52, RIGHT = 14, TOP = 10, BOTTOM = 26, COLORS = 10;
  const DASHES = ["", "6 3", "2 3"];
  const view = {from: null, to: null, smoothing: 2}; /* tokens; percent of the run */
  const charts = [];

  /* Numbers as format.py writes them. */
  const trimmed = (text) => text.replace(/(\.\d*?)0+$/, "$1").replace(/\.$/, "");
  const number = (value, digits = 4) => {
    if (value === 0) return "0";
    const size = Math.abs(value);
    if (size < 1e-3 || size >= 1e6) {
      const [mantissa, power] = value.toExponential(digits - 1).split("e");
      return `${trimmed(mantissa)}e${power[0]}${power.slice(1).padStart(2, "0")}`;
    }
    return trimmed(Number(value.toPrecision(digits)).toFixed(Math.max(0, digits - 1 - Math.floor(Math.log10(size)))));
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

  const escaped = (text) => text.replace(/[&<>"]/g, (c) => `&#${c.charCodeAt(0)};`);
  const round = (text) => text.replace(/^(-?\d+)\.(\d*?)0*(\D*)$/, (_, whole, part, unit) => whole + (part && "." + part) + unit);

  function linearTicks(low, high, wanted = 5) {
    const raw = (high - low) / wanted, power = 10 ** Math.floor(Math.log10(raw));
    const far = (step) => Math.abs(Math.log(step / raw));
    const step = [1, 2, 5, 10].map((m) => m * power).reduce((a, b) => far(b) < far(a) ? b : a);
    const ticks = [];
    for (let i = Math.ceil(low / step - 1e-9); i <= high / step + 1e-9; i++) ticks.push(i * step);
    return ticks;
  }

  function logTicks(low, high) {
    for (const marks of [[1], [1, 3], [1, 2, 5]]) {
      const ticks = [];
      for (let d = Math.floor(Math.log10(low)); d <= Math.ceil(Math.log10(high)); d++) {
        ticks.push(...marks.map((m) => m * 10 ** d).filter((t) => t >= low && t <= high));
      }
      if (ticks.length >= 3) return ticks.filter((_, i) => i % Math.ceil(ticks.length / 6) === 0);
    }
    return linearTicks(low, high);
  }

  function tickLabel(value, ticks, log) {
    const top = Math.max(...ticks.map(Math.abs));
    if (top >= 1e4) return round(count(value));
    if (log || top < 1e-3) return number(value, 3);
    const step = ticks.length > 1 ? ticks[1] - ticks[0] : top;
    return value.toFixed(Math.max(0, -Math.floor(Math.log10(step) + 1e-9)));
  }

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

  /* The index of the place in `xs`, which rise, that is nearest to x. */
  function nearest(xs, x) {
    let low = 0, high = xs.length - 1;
    while (high - low > 1) {
      const middle = (low + high) >> 1;
      if (xs[middle] < x) low = middle; else high = middle;
    }
    return Math.abs(xs[low] - x) <= Math.abs(xs[high] - x) ? low : high;
  }

  class Chart {
    constructor(figure, data) {
      this.figure = figure;
      this.data = data;
      this.log = data.log;
      this.title = figure.querySelector("figcaption b").textContent;
      this.form = FORMS[data.form];
      this.still = figure.querySelector("svg[role]");
      this.svg = this.still.cloneNode(false);
      this.svg.setAttribute("class", "live");
      this.svg.setAttribute("tabindex", "0");
      this.still.after(this.svg);
      this.still.style.display = "none";
      this.tip = figure.appendChild(document.createElement("div"));
      this.tip.className = "tip";
      this.tip.hidden = true;
      this.addLog();
      this.listen();
    }

    addLog() {
      if (!this.data.lines.every((line) => (line.low ?? line.y).every((v) => v === null || v > 0))) return;
      const button = document.createElement("button");
      button.textContent = "log axis";
      button.setAttribute("aria-pressed", this.log);
      button.onclick = () => {
        this.log = !this.log;
        button.setAttribute("aria-pressed", this.log);
        this.draw();
      };
      this.figure.querySelector("figcaption").append(button);
    }

    /* What is seen of a line: its points within the zoom and one beyond each end. */
    seen(line, from, to) {
      let first = line.x.findIndex((x) => x >= from), last = line.x.findLastIndex((x) => x <= to);
      if (first < 0) first = line.x.length;
      return [Math.max(0, first - 1), Math.min(line.x.length, last + 2)];
    }

    /* Least and greatest y: a steep beginning runs out of the frame unless it is zoomed into. */
    range(from, to) {
      const collect = (start) => this.data.lines.flatMap((line) =>
        line.x.flatMap((x, i) => x < start || x > to || line.y[i] === null ? [] : [(line.low ?? line.y)[i], (line.high ?? line.y)[i]]));
      let values = collect(from);
      if (view.from === null && this.data.skip) {
        const framed = collect(this.data.skip * this.data.end);
        if (framed.length >= 40) values = framed;
      }
      let [low, high] = values.reduce(([a, b], v) => [Math.min(a, v), Math.max(b, v)], [Infinity, -Infinity]);
      if (!(low <= high)) [low, high] = [0, 1];
      if (this.log) return [low / 1.1, high * 1.1];
      if (this.data.zero) [low, high] = [Math.min(low, 0), Math.max(high, 0)];
      const margin = high - low > 1e-12 * Math.max(Math.abs(low), Math.abs(high)) ? 0.05 * (high - low) : Math.abs(high) * 0.1 || 1;
      return [this.data.zero && low === 0 ? low : low - margin, high + margin];
    }

    draw() {
      const width = this.figure.clientWidth - parseFloat(getComputedStyle(this.figure).paddingLeft) * 2;
      if (width <= LEFT + RIGHT) return; /* in a folded group */
      const from = view.from ?? 0, to = view.to ?? (this.data.end || 1);
      const [low, high] = this.range(from, to), place = this.log ? Math.log : (v) => v;
      const inner = {width: width - LEFT - RIGHT, height: HEIGHT - TOP - BOTTOM};
      this.x = (value) => LEFT + (value - from) / (to - from) * inner.width;
      this.y = (value) => TOP + (1 - (place(value) - place(low)) / (place(high) - place(low))) * inner.height;
      this.tokens = (x) => from + (x - LEFT) / inner.width * (to - from);
      this.svg.setAttribute("viewBox", `0 0 ${width} ${HEIGHT}`);
      this.svg.innerHTML = this.grid(low, high, from, to, width)
        + `<svg x="${LEFT - 4}" y="${TOP}" width="${inner.width + 8}" height="${inner.height}" viewBox="${LEFT - 4} ${TOP} ${inner.width + 8} ${inner.height}">`
        + this.data.lines.map((line, i) => this.line(line, i, from, to)).join("") + "</svg>"
        + this.events(from, to)
        + `<rect class="picked" y="${TOP}" height="${inner.height}" width="0"/><g class="marks"></g>`;
    }

    /* Where something happened to the run; what, where the pointer rests. */
    events(from, to) {
      return (this.data.marks ?? []).filter((mark) => mark.x >= from && mark.x <= to).map((mark) =>
        `<g><title>${escaped(mark.what)}</title><line class="event" stroke-dasharray="2 2" x1="${this.x(mark.x)}" x2="${this.x(mark.x)}" y1="${TOP}" y2="${HEIGHT - BOTTOM}"/></g>`).join("");
    }

    grid(low, high, from, to, width) {
      const ticks = this.log ? logTicks(low, high) : linearTicks(low, high);
      const rows = ticks.map((v) => `<line class="grid" x1="${LEFT}" x2="${width - RIGHT}" y1="${this.y(v)}" y2="${this.y(v)}"/>`
        + `<text class="axis" x="${LEFT - 7}" y="${this.y(v) + 3.5}" text-anchor="end">${tickLabel(v, ticks, this.log)}</text>`);
      const bottom = HEIGHT - BOTTOM, places = linearTicks(from, to, width < 420 ? 4 : 5);
      const columns = places.map((v) => `<line class="base" x1="${this.x(v)}" x2="${this.x(v)}" y1="${bottom}" y2="${bottom + 4}"/>`
        + `<text class="axis" x="${this.x(v)}" y="${bottom + 16}" text-anchor="${this.x(v) > width - 24 ? "end" : "middle"}">${round(count(v))}</text>`);
      return rows.join("") + `<line class="base" x1="${LEFT}" x2="${width - RIGHT}" y1="${bottom}" y2="${bottom}"/>` + columns.join("");
    }

    line(line, i, from, to) {
      const [first, last] = this.seen(line, from, to), dash = DASHES[Math.floor(i / COLORS) % DASHES.length];
      const style = `--c:var(--s${i % COLORS})` + (dash && `;stroke-dasharray:${dash}`);
      const path = (values, kind) => {
        let text = "", pen = "M", dots = "";
        for (let k = first; k < last; k++) {
          if (values[k] === null) { pen = "M"; continue; }
          const ends = kind === "line faint" && line.low ? [line.low[k], line.high[k]] : [values[k]];
          for (const value of ends) {
            text += `${pen}${this.x(line.x[k]).toFixed(1)} ${this.y(value).toFixed(1)}`;
            pen = "L";
          }
          const alone = (values[k - 1] ?? null) === null && (values[k + 1] ?? null) === null;
          if (alone || last - first <= 20) dots += `<circle class="dot" style="${style}" cx="${this.x(line.x[k])}" cy="${this.y(values[k])}" r="2.6"/>`;
        }
        return `<path class="${kind}" style="${style}" d="${text}"/>` + dots;
      };
      line.trend = this.smoothed(line);
      if (!line.trend && !line.low) return path(line.y, "line");
      return path(line.y, "line faint") + path(line.trend ?? line.y, "line");
    }

    smoothed(line) {
      const window = 2 * Math.round(line.x.length * view.smoothing / 200) + 1;
      return this.data.smooth && window > 1 && line.x.length >= 40 ? movingMean(line.y, window) : null;
    }

    /* The values where the pointer is, and marks on the lines. */
    tell(x) {
      const at = this.tokens(Math.max(LEFT, x));
      const xs = this.data.lines.map((line) => line.x[nearest(line.x, at)]);
      const exact = xs.reduce((a, b) => Math.abs(b - at) < Math.abs(a - at) ? b : a);
      const rows = [], marks = [`<line class="cross" x1="${this.x(exact)}" x2="${this.x(exact)}" y1="${TOP}" y2="${HEIGHT - BOTTOM}"/>`];
      this.data.lines.forEach((line, i) => {
        const k = line.x.indexOf(exact);
        if (k < 0) return;
        const style = `--c:var(--s${i % COLORS})`;
        const value = line.y[k] === null ? "not finite" : this.form(line.y[k]);
        const span = line.low && line.y[k] !== null ? ` (${this.form(line.low[k])} to ${this.form(line.high[k])})` : "";
        const mean = line.trend && line.trend[k] !== null ? `, smoothed ${this.form(line.trend[k])}` : "";
        rows.push(`<div><i style="${style}"></i>${escaped(line.label || this.title)}: <b>${value}</b>${span}${mean}</div>`);
        const shown = (line.trend ?? line.y)[k];
        if (shown !== null) marks.push(`<circle class="dot" style="${style}" cx="${this.x(exact)}" cy="${this.y(shown)}" r="3.5"/>`);
      });
      this.at = exact;
      this.svg.querySelector(".marks").innerHTML = marks.join("");
      this.tip.innerHTML = `<div>${count(exact)} tokens</div>${rows.join("")}`;
      this.tip.hidden = false;
      const room = this.figure.clientWidth - this.tip.offsetWidth - 6, right = this.x(exact) + 28;
      this.tip.style.left = `${Math.max(6, right < room ? right : Math.min(room, this.x(exact) - this.tip.offsetWidth))}px`;
      this.tip.style.top = `${this.svg.getBoundingClientRect().top - this.figure.getBoundingClientRect().top + TOP}px`;
    }

    hush() {
      this.tip.hidden = true;
      this.svg.querySelector(".marks")?.replaceChildren();
    }

    pick(start, end) {
      const rect = this.svg.querySelector(".picked");
      rect.setAttribute("x", Math.max(LEFT, Math.min(start, end)));
      rect.setAttribute("width", Math.abs(end - Math.max(LEFT, start)));
    }

    listen() {
      let start = null;
      const place = (event) => event.clientX - this.svg.getBoundingClientRect().left;
      this.svg.onpointerdown = (event) => {
        event.preventDefault(); /* neither a frame of focus nor a selection of text */
        start = place(event);
        this.svg.setPointerCapture(event.pointerId);
        charts.forEach((chart) => chart.hush());
        this.tell(start);
      };
      this.svg.onpointermove = (event) => {
        this.tell(place(event));
        if (start !== null) this.pick(start, place(event));
      };
      this.svg.onpointerup = (event) => {
        const from = start, to = place(event);
        start = null;
        if (from !== null && Math.abs(to - from) > 8) zoom(this.tokens(Math.min(from, to)), this.tokens(Math.max(from, to)), this.data.end);
      };
      this.svg.onpointercancel = () => { start = null; this.draw(); this.hush(); };
      this.svg.onpointerleave = (event) => { if (event.pointerType === "mouse") this.hush(); };
      this.svg.ondblclick = () => zoom(null, null);
      this.svg.onkeydown = (event) => {
        const step = {ArrowLeft: -1, ArrowRight: 1}[event.key];
        if (step) {
          const line = this.data.lines[0], k = nearest(line.x, this.at ?? 0) + step;
          this.tell(this.x(line.x[Math.max(0, Math.min(line.x.length - 1, k))]));
          event.preventDefault();
        } else if (event.key === "Escape") {
          zoom(null, null);
          this.hush();
        }
      };
    }
  }

  const drawAll = () => charts.forEach((chart) => chart.draw());

  function zoom(from, to, end) {
    view.from = from === null ? null : Math.max(0, from);
    view.to = to === null ? null : Math.min(end, to);
    document.querySelectorAll(".tools .whole").forEach((button) => { button.disabled = from === null; });
    document.body.classList.toggle("zoomed", from !== null);
    drawAll();
  }

  function addTools(heading) {
    const tools = document.createElement("div");
    tools.className = "tools";
    tools.innerHTML = '<label>smoothing <input type="range" min="0" max="20" step="1"><output></output></label>'
      + '<button class="whole" disabled>whole run</button><span>along the bottom: tokens; drag across a chart to zoom, double-click to leave</span>';
    const [slider, output] = [tools.querySelector("input"), tools.querySelector("output")];
    const tell = () => { output.textContent = view.smoothing ? `${view.smoothing}% of the run` : "none"; };
    slider.value = view.smoothing;
    slider.oninput = () => { view.smoothing = Number(slider.value); tell(); drawAll(); };
    tools.querySelector(".whole").onclick = () => zoom(null, null);
    tell();
    heading.after(tools);
  }

  for (const element of document.querySelectorAll('figure script[type="application/json"]')) {
    charts.push(new Chart(element.parentElement, JSON.parse(element.textContent)));
  }
  if (charts.length) addTools(charts[0].figure.closest("section").querySelector("h2"));
  document.querySelectorAll(".still").forEach((words) => words.remove()); /* of pictures that stand still */
  document.querySelectorAll(".legend").forEach((legend) => { legend.hidden = !legend.textContent.trim(); });
  document.addEventListener("toggle", drawAll, true);
  window.addEventListener("resize", drawAll);
  drawAll();
})();
