"use strict";
(() => {
  // Every text comes from a logbook and may contain anything. It is only ever shown as text: no
  // markup is built from strings here.
  let story = JSON.parse(document.getElementById("data").textContent);
  const live = story.live;
  const view = { rank: null, loader: null, cause: null, search: "", sort: null, open: new Set(),
    rows: 100, cards: 50, range: null, hidden: new Set() };
  let charts = [];

  // -- words -----------------------------------------------------------------------------

  const grouped = (value) => Math.round(value).toLocaleString("en");
  const many = (count, what) => `${grouped(count)} ${what}${count === 1 ? "" : "s"}`;
  const percent = (share) => share === null || share === undefined ? "–"
    : share > 0 && share < 0.1 ? `${(100 * share).toFixed(1)}%` : `${Math.round(100 * share)}%`;
  const short = (value) => value >= 100 ? grouped(value) : Number(value.toPrecision(3)).toString();

  function bytes(value) {
    if (value === null || value === undefined) return "–";
    for (const unit of ["B", "KiB", "MiB", "GiB", "TiB"]) {
      if (Math.abs(value) < 1024 || unit === "TiB") return `${short(value)} ${unit}`;
      value /= 1024;
    }
  }

  function span(seconds) {
    if (seconds === null || seconds === undefined) return "–";
    if (seconds < 1e-3) return `${short(seconds * 1e6)} µs`;
    if (seconds < 1) return `${short(seconds * 1e3)} ms`;
    if (seconds < 120) return `${short(seconds)} s`;
    if (seconds < 5400) return `${short(seconds / 60)} min`;
    return seconds < 172800 ? `${short(seconds / 3600)} h` : `${short(seconds / 86400)} days`;
  }

  const pad = (value) => String(value).padStart(2, "0");
  function day(at) {
    const date = new Date(at * 1000);
    return `${date.getFullYear()}-${pad(date.getMonth() + 1)}-${pad(date.getDate())}`;
  }
  function clock(at) {
    const date = new Date(at * 1000);
    return `${pad(date.getHours())}:${pad(date.getMinutes())}:${pad(date.getSeconds())}`;
  }
  const oneDay = () => story.began !== null && day(story.began) === day(story.last);
  const when = (at) => oneDay() ? clock(at) : `${day(at)} ${clock(at)}`;

  // -- elements --------------------------------------------------------------------------

  function make(tag, properties, ...children) {
    const element = document.createElement(tag);
    for (const [name, value] of Object.entries(properties || {})) {
      if (value === null || value === undefined || value === false) continue;
      if (name.startsWith("on")) element.addEventListener(name.slice(2), value);
      else if (name === "colour") element.style.background = `var(${value})`;
      else if (name === "width") element.style.width = value;
      else element.setAttribute(name, value === true ? "" : value);
    }
    for (const child of children.flat()) {
      if (child === null || child === undefined || child === false) continue;
      element.append(child instanceof Node ? child : document.createTextNode(String(child)));
    }
    return element;
  }

  const say = (words) => { document.getElementById("said").textContent = words; };
  const colours = new Map(); // until the page is drawn again: to ask the browser takes long
  function colour(name) {
    if (!colours.has(name)) {
      colours.set(name, getComputedStyle(document.documentElement).getPropertyValue(name).trim());
    }
    return colours.get(name);
  }

  function part(id, title, words, ...children) {
    return make("section", { id, "aria-labelledby": `${id}-title` },
      make("h2", { id: `${id}-title` }, title),
      words && make("p", { class: "soft" }, words), ...children);
  }

  /** A details element that stays open when the page is drawn again. */
  function fold(key, properties, summary, ...body) {
    const element = make("details", { ...properties, open: view.open.has(key) }, summary, ...body);
    element.addEventListener("toggle", () => {
      if (element.open) view.open.add(key); else view.open.delete(key);
    });
    return element;
  }

  // -- which ranks and loaders -----------------------------------------------------------

  const fits = (one) => (view.rank === null || one.rank === view.rank)
    && (view.loader === null || one.loader === view.loader || one.loader === undefined);
  const manyRanks = () => story.several.ranks.length > 1;
  const manyLoaders = () => story.several.loaders.length > 1;

  function whose(one) {
    const words = [];
    if (manyLoaders() && one.loader) words.push(one.loader);
    if (manyRanks()) words.push(`rank ${one.rank}`);
    return words.join(", ");
  }

  function chooser(name, values, label) {
    const select = make("select", { id: `choose-${name}`, onchange: () => {
      view[name] = select.value === "" ? null : values[Number(select.value)];
      draw();
      document.getElementById(`choose-${name}`).focus();
    } }, make("option", { value: "" }, "all"),
    ...values.map((value, at) => make("option", { value: at, selected: view[name] === value }, value)));
    return make("label", {}, label, select);
  }

  // -- head ------------------------------------------------------------------------------

  const STATES = {
    running: ["good", "still running"], ended: ["", "ended"], cut: ["bad", "stopped without an end"],
    unknown: ["", "no progress was recorded"],
  };

  function head() {
    const [tone, words] = onlyTuning() ? ["", "tuning"] : STATES[story.state];
    const first = story.loaders.find((one) => one.host) || {};
    const all = [["time", "Time"], ["memory", "Memory"], ["samples", "Samples"],
      ["incidents", "Incidents"], ["bad", "Bad samples"], ["setup", "Versions and options"]];
    const links = [...(story.tuning.length > 0 ? [["tuning", "Tuning"]] : []),
      ...(onlyTuning() ? all.slice(-1) : all)];
    return [
      make("h1", {}, story.title, " ", make("span", { class: `badge ${tone}`, id: "state" }, words)),
      make("div", { class: "facts" },
        story.began !== null && make("span", {}, `${day(story.began)} ${clock(story.began)} – ${
          oneDay() ? clock(story.last) : `${day(story.last)} ${clock(story.last)}`}`),
        first.host && make("span", {}, `on ${first.host}`),
        first.command && first.command.length > 0
          && make("span", { class: "mono" }, first.command.join(" ")),
        manyRanks() && make("span", {}, many(story.several.ranks.length, "rank")),
        manyLoaders() && make("span", {}, many(story.several.loaders.length, "loader"))),
      story.state === "cut" && make("p", { class: "small" },
        `The last record is of ${day(story.last)} ${clock(story.last)}. The loader was not closed `
        + "after it: the process, the container or the machine was ended."),
      make("nav", { "aria-label": "Parts of the report" },
        ...links.map(([id, name]) => make("a", { href: `#${id}` }, name)),
        make("span", { class: "push" }),
        manyRanks() && chooser("rank", story.several.ranks, "Rank"),
        manyLoaders() && chooser("loader", story.several.loaders, "Loader")),
    ];
  }

  function verdict() {
    const found = story.headline;
    const words = [];
    let tone = "";
    if (found.gave_up) {
      tone = "bad";
      words.push(`The loader gave up after ${many(found.deaths, "worker death")}.`);
    } else if (found.deaths) {
      words.push(found.deaths === 1 ? "A worker died, and the run went on."
        : `${grouped(found.deaths)} workers died, and the run went on.`);
    } else {
      words.push("No worker was lost.");
    }
    if (found.inexact) {
      tone = tone || "warn";
      words.push(`After ${many(found.inexact, "death")} a stream did not continue exactly: samples may `
        + "be missing or come twice.");
    } else if (found.deaths && !found.gave_up) {
      words.push("What a lost worker was making was made again.");
    }
    if (found.lost) {
      tone = tone || "warn";
      words.push(`${many(found.lost, "bad sample")} ${found.lost === 1 ? "was" : "were"} left out or replaced.`);
    }
    if (found.leaks) { tone = tone || "warn"; words.push("Workers leak memory."); }
    if (story.state === "cut") tone = "bad";
    return make("section", { class: `verdict ${tone}`, id: "verdict", "aria-label": "In short" },
      words.join(" "));
  }

  function tile(name, value, more, tone) {
    return make("div", { class: `tile ${tone || ""}` }, make("div", { class: "name" }, name),
      make("div", { class: "value" }, value), make("div", { class: "more" }, more || "\u00a0"));
  }

  function tiles() {
    const found = story.headline;
    const known = found.recorded;
    const about = found.approximate ? "about " : "";
    const rate = known && found.active > 0 ? found.samples / found.active : null;
    return make("div", { class: "tiles", id: "headline" },
      tile("Batches", known ? grouped(found.batches) : "–", known && found.bytes > 0 && bytes(found.bytes)),
      tile("Samples", known ? about + grouped(found.samples) : "–",
        rate !== null && `${short(rate)} a second`),
      tile("Time", span(found.seconds), oneDay() ? null : "from first to last record"),
      tile("Deaths survived", grouped(found.gave_up ? Math.max(0, found.deaths - 1) : found.deaths),
        found.gave_up ? "then the loader gave up" : found.inexact ? "a stream went on inexactly"
          : found.deaths ? "batches made again" : "no worker died",
        found.gave_up ? "bad" : found.inexact ? "warn" : "good"),
      tile("Samples lost", grouped(found.lost), found.bad > found.lost
        ? `${grouped(found.bad)} bad in all` : found.lost ? "left out or replaced" : "all were usable",
      found.lost ? "warn" : "good"),
      tile("Trainer waited", known ? span(found.waited) : "–",
        known && found.active > 0 && `${percent(Math.min(1, found.waited / found.active))} of the time`,
        known && found.waited / found.active > 0.3 ? "warn" : ""));
  }

  // -- where the time goes ---------------------------------------------------------------

  const STEPS = [["fetch", "Loading samples"], ["collate", "Collating"], ["send", "Handing over"],
    ["start", "Starting"], ["idle", "Nothing to do"]];

  function shares(name, parts) {
    const whole = parts.reduce((sum, one) => sum + one.value, 0);
    if (!(whole > 0)) return null;
    const words = parts.map((one) => `${one.name} ${percent(one.value / whole)}`);
    return make("div", { class: "share" }, make("h3", {}, name),
      make("div", { class: "bar", role: "img", "aria-label": `${name}: ${words.join(", ")}` },
        ...parts.map((one) => make("span", { colour: one.colour, width: `${100 * one.value / whole}%`,
          title: `${one.name}: ${percent(one.value / whole)}` }))),
      make("div", { class: "keys" }, ...parts.map((one, at) => make("span", {},
        make("span", { class: "swatch", colour: one.colour }), words[at]))));
  }

  function timePart() {
    const flows = story.flows.filter(fits);
    if (flows.length === 0) {
      return part("time", "Where the time goes", null, make("p", {}, story.headline.recorded
        ? "There are no records of this selection."
        : "This logbook has no records of progress: it is of a run that ended at once, or of an earlier "
        + "version of holdfast."));
    }
    const sum = (name) => flows.reduce((all, one) => all + one[name], 0);
    const spent = (step) => flows.reduce((all, one) => all + one.seconds[step], 0);
    const waited = Math.min(sum("waited"), sum("active"));
    const workers = flows.some((one) => one.workers);
    return part("time", "Where the time goes", null,
      make("p", { id: "bottleneck" }, make("strong", {}, "What limits this run: "),
        story.bottleneck.words, " ", story.bottleneck.advice),
      make("div", { class: "two" },
        shares("Trainer", [
          { name: "Training", value: sum("active") - waited, colour: "--train" },
          { name: workers ? "Waiting for data" : "Loading data (it has no workers)", value: waited, colour: "--wait" }]),
        shares("Workers", STEPS.map(([step, name]) =>
          ({ name, value: spent(step), colour: `--${step}` })))),
      make("h3", {}, "Samples a second"), chartPlace("rate"),
      make("div", { class: "two" },
        make("div", {}, make("h3", {}, workers ? "Share of time in which the trainer waited"
          : "Share of time that loading took"), chartPlace("waiting")),
        workers && make("div", {}, make("h3", {}, "What workers did"), chartPlace("steps"))));
  }

  // -- charts ----------------------------------------------------------------------------

  const chartPlace = (name) => make("div", { class: "chart", id: `chart-${name}`, tabindex: "0",
    role: "group", "aria-roledescription": "chart" });

  /** A gap of two intervals is only a late record; uPlot draws through undefined values. */
  function bridged(values) {
    const found = values.slice();
    for (let at = 0, known = -1; at < found.length; at++) {
      if (found[at] === null) continue;
      if (known >= 0 && at - known <= 3) for (let gap = known + 1; gap < at; gap++) found[gap] = undefined;
      known = at;
    }
    return found;
  }

  /** Points without a neighbour, which no line would show. */
  function lonely(plot, number) {
    const values = plot.data[number], found = [];
    const none = (at) => values[at] === null || at < 0 || at >= values.length;
    for (let at = 0; at < values.length; at++) {
      if (values[at] !== null && values[at] !== undefined && none(at - 1) && none(at + 1)) found.push(at);
    }
    return found;
  }

  const POWERS = Array.from({ length: 50 }, (_, power) => 2 ** power);

  function marks() { return story.incidents.filter(fits); }

  function axis(format, size) {
    return { stroke: colour("--soft"), font: "12px system-ui, sans-serif", size: size || 70,
      grid: { stroke: colour("--grid"), width: 1 }, ticks: { stroke: colour("--grid"), width: 1 },
      values: (_, splits) => splits.map((value) => value === null ? "" : format(value)) };
  }

  function timeAxis() {
    const found = axis(String);
    delete found.values;
    delete found.size;
    return { ...found, space: 84, values: [
      [31536000, "{YYYY}", null, null, null, null, null, null, 1],
      [2419200, "{YYYY}-{MM}", null, null, null, null, null, null, 1],
      [86400, "{MM}-{DD}", "\n{YYYY}", null, null, null, null, null, 1],
      [3600, "{HH}:{mm}", "\n{YYYY}-{MM}-{DD}", null, "\n{MM}-{DD}", null, null, null, 1],
      [60, "{HH}:{mm}", "\n{YYYY}-{MM}-{DD}", null, "\n{MM}-{DD}", null, null, null, 1],
      [1, "{HH}:{mm}:{ss}", "\n{YYYY}-{MM}-{DD}", null, "\n{MM}-{DD}", null, null, null, 1],
    ] };
  }

  function drawMarks(plot) {
    const context = plot.ctx;
    const { left, top, width, height } = plot.bbox;
    const scale = devicePixelRatio || 1;
    context.save();
    context.beginPath();
    context.rect(left - 1, top, width + 2, height);
    context.clip();
    const drawn = new Set();
    for (const one of marks()) {
      const x = Math.round(plot.valToPos(one.time, "x", true));
      if (drawn.has(x)) continue;
      drawn.add(x);
      context.strokeStyle = context.fillStyle = colour(mild(one) ? "--soft" : "--bad");
      context.globalAlpha = 0.5;
      context.lineWidth = scale;
      context.setLineDash([4 * scale, 3 * scale]);
      context.beginPath();
      context.moveTo(x, top);
      context.lineTo(x, top + height);
      context.stroke();
      context.globalAlpha = 1;
      context.beginPath();
      context.moveTo(x - 5 * scale, top);
      context.lineTo(x + 5 * scale, top);
      context.lineTo(x, top + 8 * scale);
      context.fill();
    }
    context.restore();
  }

  const mild = (one) => one.kind === "recycled" || one.kind === "renewed" || one.cause === "ended-on-request";

  function nearest(plot, left) {
    let found = null, best = 7;
    for (const one of marks()) {
      const away = Math.abs(plot.valToPos(one.time, "x") - left);
      if (away < best) { best = away; found = one; }
    }
    return found;
  }

  /**
   * A chart over time. `lines`: name, values, colour, and optionally dash, width, fill, shown (the
   * values of the legend, where they are not those that are drawn).
   */
  function timeChart(name, lines, format, options = {}) {
    const place = document.getElementById(`chart-${name}`);
    if (!place) return;
    if (lines.length === 0 || story.times.length === 0) {
      place.append(make("p", { class: "soft" }, "Nothing was recorded."));
      return;
    }
    const key = (line) => `${name} ${line.name}`;
    const HINT = options.hint || "";
    const note = make("span", { class: "note" }, HINT);
    const buttons = lines.map((line, at) => make("button", { type: "button",
      "aria-pressed": String(!view.hidden.has(key(line))), title: "Show or hide", onclick: () => {
        const shown = view.hidden.has(key(line));
        if (shown) view.hidden.delete(key(line)); else view.hidden.add(key(line));
        buttons[at].setAttribute("aria-pressed", String(shown));
        plot.setSeries(at + 1, { show: shown });
      } },
    make("span", { class: "swatch", colour: line.colour }), line.name, make("span", { class: "at" })));
    const canvas = make("div");
    const plot = new uPlot({
      width: place.clientWidth || 600, height: options.height || 220,
      legend: { show: false },
      cursor: { sync: { key: "time", setSeries: false }, drag: { x: true, y: false },
        points: { size: 7 }, focus: { prox: 24 } },
      focus: { alpha: lines.length > 4 ? 0.35 : 1 },
      scales: { x: { time: true, range: (_, low, high) => view.range || [low === null ? 0 : Math.min(low, story.began), high] },
      y: { range: options.range
        || ((_, low, high) => [0, high > 0 ? high * 1.08 : 1]) } },
      axes: [timeAxis(), { ...axis(format, options.size), ...(format === bytes ? { incrs: POWERS } : {}) }],
      series: [{}, ...lines.map((line) => ({ label: line.name, stroke: colour(line.colour),
        width: line.width || 1.5, dash: line.dash, fill: line.fill ? colour(line.colour) : undefined,
        show: !view.hidden.has(key(line)), points: { size: 4, filter: lonely } }))],
      hooks: {
        draw: [drawMarks],
        setCursor: [(self) => {
          const at = self.cursor.idx;
          lines.forEach((line, number) => {
            const value = at === null || at === undefined ? null : (line.shown || line.values)[at];
            buttons[number].lastChild.textContent = value === null || value === undefined ? "" : format(value);
          });
          const hit = self.cursor.left >= 0 ? nearest(self, self.cursor.left) : null;
          note.classList.toggle("hit", hit !== null);
          note.textContent = hit !== null ? `${when(hit.time)} ${hit.text || hit.title}`
            : at !== null && at !== undefined && self.cursor.left >= 0 ? when(story.times[at]) : HINT;
          canvas.style.cursor = hit === null ? "" : "pointer";
        }],
        setScale: [(self, scale) => { if (scale === "x") noteRange(self); }],
      },
    }, [story.times, ...lines.map((line) => options.bridged ? bridged(line.values) : line.values)], canvas);
    plot.over.addEventListener("click", () => {
      const hit = nearest(plot, plot.cursor.left);
      if (hit !== null) show(hit);
    });
    place.setAttribute("aria-label", `${options.label}. ${summary(lines, format)} Left and right arrow keys `
      + "move the cursor, plus and minus zoom, Escape shows everything.");
    place.addEventListener("keydown", (event) => keys(event, plot, lines, format));
    place.append(canvas, make("div", { class: "legend" }, ...buttons),
      make("div", { class: "under" }, note,
        make("button", { type: "button", class: "reset", hidden: view.range === null, onclick: () => zoom(null) },
          "Show everything")),
      table(`table-${name}`, lines, format));
    charts.push({ plot, place, time: true });
  }

  function summary(lines, format) {
    return lines.slice(0, 12).map((line) => {
      const known = (line.shown || line.values).filter((value) => value !== null && value !== undefined);
      return known.length === 0 ? "" : `${line.name}: from ${format(Math.min(...known))} to ${
        format(Math.max(...known))}.`;
    }).join(" ");
  }

  /** The values of a chart, made when they are asked for. */
  function table(key, lines, format) {
    const element = fold(key, { class: "fold" }, make("summary", {}, "As a table"));
    const fill = () => {
      if (element.open && element.childElementCount === 1) element.append(asTable(lines, format));
    };
    element.addEventListener("toggle", fill);
    fill();
    return element;
  }

  function asTable(lines, format) {
    const step = Math.max(1, Math.ceil(story.times.length / 30));
    const rows = story.times.map((_, at) => at).filter((at) => at % step === 0);
    return make("div", { class: "scroll" }, make("table", {},
      make("thead", {}, make("tr", {}, make("th", { scope: "col" }, "Time"),
        ...lines.map((line) => make("th", { scope: "col", class: "number" }, line.name)))),
      make("tbody", {}, ...rows.map((at) => make("tr", {}, make("td", {}, when(story.times[at])),
        ...lines.map((line) => {
          const value = (line.shown || line.values)[at];
          return make("td", { class: "number" }, value === null || value === undefined ? "–" : format(value));
        }))))));
  }

  const whole = () => [Math.min(story.times[0], story.began), story.times[story.times.length - 1]];

  let zooming = false;
  function noteRange(plot) {
    if (zooming || !plot.scales.x || plot.scales.x.min === undefined) return;
    const { min, max } = plot.scales.x;
    const [first, last] = whole();
    zoom(min <= first && max >= last ? null : [min, max], plot);
  }

  function zoom(range, except) {
    zooming = true;
    view.range = range;
    for (const one of charts) {
      if (!one.time) continue;
      const reset = one.place.querySelector(".reset");
      if (reset) reset.hidden = range === null;
      if (one.plot === except) continue;
      const [min, max] = range || whole();
      if (max > min) one.plot.setScale("x", { min, max });
    }
    // uPlot applies a scale in a later task; its hook must not start this again.
    setTimeout(() => { zooming = false; }, 0);
  }

  function keys(event, plot, lines, format) {
    const { min, max } = plot.scales.x;
    const last = story.times.length - 1;
    const at = plot.cursor.idx ?? Math.floor(last / 2);
    const middle = story.times[at];
    const moves = { ArrowLeft: -1, ArrowRight: 1, PageUp: -10, PageDown: 10 };
    if (event.key in moves) {
      const to = Math.max(0, Math.min(last, at + moves[event.key]));
      plot.setCursor({ left: plot.valToPos(story.times[to], "x"), top: 10 });
      say(`${when(story.times[to])}: ${lines.filter((_, number) => plot.series[number + 1].show).slice(0, 8)
        .map((line) => `${line.name} ${format((line.shown || line.values)[to] ?? NaN)}`).join(", ")}`);
    } else if (event.key === "+" || event.key === "=") {
      zoom([middle - (middle - min) / 2, middle + (max - middle) / 2]);
    } else if (event.key === "-") {
      const [first, end] = whole();
      const low = Math.max(first, middle - 2 * (middle - min));
      const high = Math.min(end, middle + 2 * (max - middle));
      zoom(low <= first && high >= end ? null : [low, high]);
    } else if (event.key === "Escape") {
      zoom(null);
    } else {
      return;
    }
    event.preventDefault();
  }

  const CURVES = 10;
  const SHARED = ["--collate", "--start", "--send", "--train"];

  function flowLines(field) {
    const flows = story.flows.filter(fits);
    return flows.slice(0, 40).map((flow, at) => ({ name: whose(flow) || (field === "samples"
      ? "samples a second" : "trainer waited"), values: flow[field], colour: `--c${at % CURVES}` }));
  }

  /** The share of each step, on top of each other. */
  function stepLines() {
    const flows = story.flows.filter(fits);
    if (flows.length === 0) return [];
    const weights = flows.map((flow) => (flow.workers ? flow.active : 0));
    const values = {};
    for (const [step] of STEPS) {
      values[step] = story.times.map((_, at) => {
        let sum = 0, weight = 0;
        flows.forEach((flow, number) => {
          const value = flow.steps[step][at];
          if (value !== null) { sum += value * weights[number]; weight += weights[number]; }
        });
        return weight > 0 ? sum / weight : null;
      });
    }
    const below = story.times.map(() => 0);
    const lines = STEPS.map(([step, name]) => ({ name, shown: values[step], colour: `--${step}`, fill: true,
      width: 0.5, values: values[step].map((value, at) => {
        if (value === null) return null;
        below[at] += value;
        return below[at];
      }) }));
    return lines.reverse();
  }

  function memoryPart() {
    const ranks = story.memory.filter((one) => view.rank === null || one.rank === view.rank);
    if (ranks.length === 0) return part("memory", "Memory", null, make("p", {}, "No memory was measured."));
    return part("memory", "Memory", "Workers and trainer: what each has of its own, and with the pages it "
      + "inherited. Shared memory: in which workers hand over batches. Markers are incidents.",
    ...ranks.slice(0, 8).flatMap((one) => [
      ranks.length > 1 && make("h3", {}, `Rank ${one.rank}`), chartPlace(`memory-${one.rank}`)]),
    ranks.length > 8 && make("p", { class: "soft" }, "Choose a rank above to see the others."));
  }

  function memoryLines(rank) {
    let worker = 0;
    let shared = 0;
    return rank.curves.filter((curve) => view.loader === null || !curve.name.includes(": ")
      || curve.name.startsWith(`${view.loader}: `)).map((curve) => {
      if (curve.name === "limit") return { ...curve, colour: "--limit", dash: [8, 4], width: 2 };
      if (curve.name === "in use") {
        return { ...curve, name: "in use in all", colour: "--used", dash: [3, 3] };
      }
      if (curve.name === "trainer") return { ...curve, colour: "--ink", width: 2 };
      if (curve.name.endsWith("shared memory")) {
        return { ...curve, colour: SHARED[shared++ % SHARED.length], width: 2 };
      }
      return { ...curve, colour: `--c${worker++ % CURVES}` };
    });
  }

  /** Far below the limit the curves would all be flat: then the limit is hidden at first. */
  function hideFarLimit(rank, lines) {
    const highest = (line) => Math.max(0, ...line.values.filter((value) => value !== null));
    const processes = lines.filter((line) => line.colour !== "--limit" && line.colour !== "--used");
    const most = Math.max(0, ...processes.map(highest));
    for (const line of lines) {
      const key = `memory-${rank} ${line.name}`;
      if ((line.colour === "--limit" || line.colour === "--used") && highest(line) > 6 * most
        && !view.open.has(`seen ${key}`)) view.hidden.add(key);
      view.open.add(`seen ${key}`);
    }
  }

  // -- samples ---------------------------------------------------------------------------

  function samplesPart() {
    const found = story.distributions.filter(fits).filter((one) => one.measured > 0);
    if (found.length === 0) {
      return part("samples", "Samples", null, make("p", {},
        "No samples were measured: the dataset loads whole batches at once, or the run has no records "
        + "of progress."));
    }
    return part("samples", "Samples", `Measured in some of the batches: ${grouped(
      found.reduce((sum, one) => sum + one.measured, 0))} samples.`,
    ...found.slice(0, 12).map((one, at) => make("div", {},
      found.length > 1 && make("h3", {}, whose(one)),
      make("div", { class: "two" },
        distribution("Time to load a sample", `times-${at}`, one.times, span, []),
        distribution("Size of a sample", `sizes-${at}`, one.sizes, bytes, one.largest),
        ranking("Slowest", one.slowest, span), ranking("Largest", one.largest, bytes)))));
  }

  function distribution(name, id, found, format, top) {
    const same = top.length > 2 && top.every((one) => one.value === top[0].value)
      && found && found.counts.filter((count) => count > 0).length === 1;
    return make("div", {}, make("h3", {}, name,
      found && !same && make("span", { class: "soft" }, ` – half of them below ${format(found.median)}`)),
    same ? make("p", {}, `All that were measured have ${format(top[0].value)}.`)
      : found ? chartPlace(id)
        : make("p", { class: "soft" }, "Not known: samples are objects whose size cannot be read."));
  }

  function ranking(name, entries, format) {
    const same = entries.length > 2 && entries.every((one) => one.value === entries[0].value);
    if (entries.length === 0 || same) return make("div");
    return make("div", { class: "scroll" }, make("table", {}, make("thead", {}, make("tr", {},
      make("th", { scope: "col" }, name), make("th", { scope: "col", class: "number" }, ""))),
    make("tbody", {}, ...entries.map((one) => make("tr", {},
      make("td", {}, one.name || (/^-?\d+$/.test(one.key) ? `sample ${one.key}` : one.key),
        one.name && make("span", { class: "soft small" }, ` (${one.key})`)),
      make("td", { class: "number" }, format(one.value)))))));
  }

  function bars(id, found, format, label) {
    const place = document.getElementById(`chart-${id}`);
    if (!place || !found) return;
    const bounds = found.from, counts = found.counts;
    const note = make("span", { class: "note" }, "");
    const range = (at) => `${format(bounds[at])} to ${format(bounds[at + 1])}: ${many(counts[at], "sample")}`;
    const plot = new uPlot({
      width: place.clientWidth || 400, height: 170, legend: { show: false },
      cursor: { drag: { x: true, y: false }, points: { show: false } },
      scales: { x: { time: false, range: (_, low, high) => low === null ? [-0.5, counts.length - 0.5]
        : [Math.max(-0.5, low), Math.min(counts.length - 0.5, high)] },
      y: { range: (_, low, high) => [0, (high || 1) * 1.08] } },
      axes: [{ ...axis((at) => Number.isInteger(at) && bounds[at] !== undefined ? format(bounds[at]) : ""),
        size: 34, space: 64, incrs: [1, 2, 4, 8, 16] }, axis(grouped, 64)],
      series: [{}, { stroke: colour("--c0"), fill: colour("--c0"), width: 0,
        paths: uPlot.paths.bars({ size: [0.9, 100], align: 0 }), points: { show: false } }],
      hooks: { setCursor: [(self) => {
        const at = self.cursor.idx;
        note.textContent = at === null || at === undefined || self.cursor.left < 0 ? "" : range(at);
      }] },
    }, [counts.map((_, at) => at), counts], place);
    place.setAttribute("aria-label", `${label}. ${counts.map((_, at) => counts[at] ? range(at) : "")
      .filter(Boolean).join("; ")}. Arrow keys move from bar to bar.`);
    place.addEventListener("keydown", (event) => {
      const move = { ArrowLeft: -1, ArrowRight: 1 }[event.key];
      if (!move) return;
      const to = Math.max(0, Math.min(counts.length - 1, (plot.cursor.idx ?? -1) + move));
      plot.setCursor({ left: plot.valToPos(to, "x"), top: 10 });
      say(range(to));
      event.preventDefault();
    });
    place.append(make("div", { class: "under" }, note));
    charts.push({ plot, place, time: false });
  }

  // -- incidents -------------------------------------------------------------------------

  const SURE = { high: ["good", "sure"], medium: ["warn", "likely"], low: ["", "a guess"] };

  function card(one, number) {
    const [tone, sure] = SURE[one.confidence] || ["", ""];
    const key = `${one.time} ${one.rank} ${one.worker_id}`;
    const evidence = Object.entries(one.evidence || {});
    const element = fold(`card ${key}`, { class: `card ${mild(one) ? "mild" : ""}`, id: `incident-${number}` },
      make("summary", {}, make("span", { class: "when" }, when(one.time)),
        whose(one) && make("span", { class: "badge" }, whose(one)), whose(one) && " ",
        one.text || `a worker ${one.title}`),
      make("div", {},
        make("h3", {}, "What happened"),
        make("p", {}, make("strong", {}, one.cause), ` – a worker ${one.title} `,
          sure && make("span", { class: `badge ${tone}` }, sure)),
        one.action && make("p", {}, `Done about it: ${one.action}.`),
        one.because.length > 0 && [make("h3", {}, "Why we think so"), make("ul", { class: "plain" },
          ...one.because.map((reason) => make("li", {}, reason)))],
        one.remedies.length > 0 && one.confidence !== "low" && [make("h3", {}, "What to do, cheapest first"),
          make("ol", { class: "plain" }, ...one.remedies.map((remedy) => make("li", {}, remedy.text,
            remedy.command && make("pre", {}, remedy.command))))],
        one.cause !== "unknown" && make("p", { class: "small soft" }, "More: ",
          make("code", {}, `holdfast explain ${one.cause}`)),
        one.stack && fold(`stack ${key}`, { class: "fold stack" }, make("summary", {}, "Stack"),
          make("pre", {}, one.stack)),
        evidence.length > 0 && fold(`evidence ${key}`, { class: "fold evidence" },
          make("summary", {}, "Evidence"), make("dl", {}, ...evidence.flatMap(([name, value]) =>
            [make("dt", {}, name), make("dd", { class: "mono" }, value)])))));
    return element;
  }

  function incidentsPart() {
    const all = story.incidents.map((one, number) => [one, number]).filter(([one]) => fits(one));
    const found = all.filter(([one]) => view.cause === null || one.cause === view.cause);
    const causes = new Map();
    for (const [one] of all) causes.set(one.cause, (causes.get(one.cause) || 0) + 1);
    const chip = (cause, words) => make("button", { type: "button", "aria-pressed": String(view.cause === cause),
      onclick: (event) => { view.cause = cause; redraw("incidents", incidentsPart, event); }, "data-cause": cause ?? "" },
    words);
    return part("incidents", "Incidents", null,
      all.length === 0 ? make("p", { class: "nothing" }, "✓ No worker died, stalled or failed to start.") : [
        make("p", { class: "soft" }, `${many(all.length, "incident")}, oldest first.`,
          story.left_out > 0 && ` ${many(story.left_out, "earlier one")} ${
            story.left_out === 1 ? "is" : "are"} only in the logbook.`),
        causes.size > 1 && make("div", { class: "chips", role: "group", "aria-label": "Show only one cause" },
          chip(null, `all (${all.length})`),
          ...[...causes].map(([cause, count]) => chip(cause, `${cause} (${count})`))),
        ...found.slice(0, view.cards).map(([one, number]) => card(one, number)),
        found.length > view.cards && make("button", { type: "button", class: "more-rows", onclick: (event) => {
          view.cards += 200;
          redraw("incidents", incidentsPart, event);
        } }, `Show more (${found.length - view.cards} left)`)]);
  }

  /** Go to the card of an incident. */
  function show(one) {
    const number = story.incidents.indexOf(one);
    view.cause = null;
    view.cards = Math.max(view.cards, number + 10);
    document.getElementById("incidents").replaceWith(incidentsPart());
    const element = document.getElementById(`incident-${number}`);
    if (!element) return;
    element.open = true;
    element.classList.add("struck");
    element.scrollIntoView({ block: "center" });
    element.querySelector("summary").focus({ preventScroll: true });
    setTimeout(() => element.classList.remove("struck"), 2500);
  }

  function redraw(id, drawn, event) {
    const again = event.target.closest("[data-cause]");
    document.getElementById(id).replaceWith(drawn());
    const same = again && [...document.querySelectorAll("[data-cause]")]
      .find((one) => one.dataset.cause === again.dataset.cause);
    if (same) same.focus();
  }

  // -- bad samples -----------------------------------------------------------------------

  const COLUMNS = [
    ["Sample", (row) => row.name || row.index],
    ["What", (row) => row.kind],
    ["Error", (row) => [row.error, row.message].filter(Boolean).join(": ")],
    ["Done", (row) => row.action],
    ["Epoch", (row) => row.epoch],
    ["When", (row) => row.time],
  ];

  function badRows() {
    const words = view.search.toLowerCase().split(/\s+/).filter(Boolean);
    const rows = story.bad.filter(fits).filter((row) => {
      const text = `${row.name || ""} ${row.index} ${row.kind} ${row.error || ""} ${row.message || ""} ${
        row.action || ""} ${whose(row)}`.toLowerCase();
      return words.every((word) => text.includes(word));
    });
    if (view.sort !== null) {
      const [column, direction] = view.sort;
      const of = COLUMNS[column][1];
      const compare = (a, b) => typeof a === "number" && typeof b === "number" ? a - b
        : String(a ?? "").localeCompare(String(b ?? ""), "en", { numeric: true });
      rows.sort((a, b) => direction * compare(of(a), of(b)));
    }
    return rows;
  }

  function badBody(rows) {
    return rows.slice(0, view.rows).map((row) => make("tr", {},
      make("td", {}, row.name || `sample ${row.index}`,
        row.name && row.index !== "null" && make("span", { class: "soft small" }, ` (${row.index})`),
        whose(row) && make("div", { class: "soft small" }, whose(row))),
      make("td", {}, row.kind, row.verdict && row.verdict !== "bad"
        && make("div", { class: "soft small" }, row.verdict)),
      make("td", {}, COLUMNS[2][1](row), row.traceback && fold(`bad ${row.time} ${row.index}`, { class: "fold" },
        make("summary", {}, "Traceback"), make("pre", {}, row.traceback))),
      make("td", {}, row.action), make("td", { class: "number" }, row.epoch ?? ""),
      make("td", { class: "number" }, row.time ? when(row.time) : "")));
  }

  function badPart() {
    const all = story.bad.filter(fits);
    if (all.length === 0) {
      return part("bad", "Bad samples", null, make("p", { class: "nothing" }, "✓ Every sample could be used."));
    }
    const body = make("tbody"), count = make("span", { class: "soft", id: "bad-count", role: "status" });
    const more = make("button", { type: "button", class: "more-rows", onclick: () => { view.rows += 500; fill(); } });
    const heads = COLUMNS.map(([name], at) => {
      const cell = make("th", { scope: "col", class: at > 3 ? "number" : null },
        make("button", { type: "button", onclick: () => {
          view.sort = [at, view.sort !== null && view.sort[0] === at ? -view.sort[1] : 1];
          fill();
        } }, name));
      return cell;
    });
    const search = make("input", { type: "search", id: "bad-search", placeholder: "Search names, errors, actions",
      "aria-label": "Search bad samples", oninput: () => { view.search = search.value; view.rows = 100; fill(); } });
    search.value = view.search;
    const fill = () => {
      const rows = badRows();
      body.replaceChildren(...badBody(rows));
      count.textContent = `${grouped(rows.length)} of ${many(all.length, "bad sample")}`;
      heads.forEach((cell, at) => {
        if (view.sort !== null && view.sort[0] === at) {
          cell.setAttribute("aria-sort", view.sort[1] > 0 ? "ascending" : "descending");
        } else {
          cell.removeAttribute("aria-sort");
        }
      });
      more.hidden = rows.length <= view.rows;
      more.textContent = `Show more (${grouped(rows.length - view.rows)} left)`;
    };
    fill();
    return part("bad", "Bad samples", story.bad_left_out > 0
      ? `${many(story.bad_left_out, "earlier one")} only in the logbook.` : null,
    make("div", { class: "tools" }, search, count),
    make("div", { class: "scroll" }, make("table", { id: "bad-table" },
      make("caption", { class: "unseen" }, "Bad samples"), make("thead", {}, make("tr", {}, ...heads)), body)), more);
  }

  // -- tuning ----------------------------------------------------------------------------

  /** A logbook of `holdfast tune`, and of no run. */
  const onlyTuning = () => story.tuning.length > 0 && !story.headline.recorded
    && story.incidents.length === 0 && story.bad.length === 0;

  const LIMITS = { cpu: "CPU", memory: "memory", disk: "disk", gil: "Python's lock (GIL)",
    consumer: "the consumer", "main process": "the main process", waiting: "waiting", workers: "too few workers",
    unknown: "unknown" };

  const badge = (confidence) => {
    const [tone, words] = SURE[confidence] || ["", confidence];
    return make("span", { class: `badge ${tone}` }, words);
  };

  function tuningPart() {
    if (story.tuning.length === 0) return null;
    return part("tuning", "Tuning", "What holdfast tune has tried, and recommends.",
      ...story.tuning.map((one, at) => make("div", {},
        make("h3", {}, `${one.target} – ${day(one.time)} ${clock(one.time)}`),
        one.code ? make("pre", {}, `loader = ${one.code}`)
          : make("p", {}, "There is no recommendation: no batch could be loaded."),
        one.limit && make("p", {}, make("strong", {}, `What limits: ${LIMITS[one.limit.kind]
          || one.limit.kind} `), badge(one.limit.confidence), ` ${one.limit.words}. ${one.limit.advice}`),
        chartPlace(`tuning-${at}`),
        one.choices.length > 0 && make("div", { class: "scroll" }, make("table", {},
          make("thead", {}, make("tr", {}, ...["Option", "Value", "Why"].map((name) =>
            make("th", { scope: "col" }, name)))),
          make("tbody", {}, ...one.choices.map(([name, value, why]) => make("tr", {},
            make("td", {}, name), make("td", { class: "mono" }, value), make("td", {}, why)))))),
        ...one.notes.map((note) => make("p", { class: "small" }, `Note: ${note}`)),
        fold(`tried ${one.time}`, { class: "fold" }, make("summary", {}, "All that was tried"), tried(one)))));
  }

  function tried(one) {
    const heads = ["Workers", "Number", "Start", "Prefetch", `${one.unit} a second`, "Error", "First batch",
      "Memory of a worker"];
    return make("div", { class: "scroll" }, make("table", {},
      make("thead", {}, make("tr", {}, ...heads.map((name, at) =>
        make("th", { scope: "col", class: at > 2 || at === 1 ? "number" : null }, name)))),
      make("tbody", {}, ...one.tried.map((row) => make("tr", {},
        make("td", {}, row.kind === "main" ? "none" : row.kind,
          row.step_seconds > 0 && make("span", { class: "soft small" }, ` with a step of ${span(row.step_seconds)}`)),
        make("td", { class: "number" }, row.workers), make("td", {}, row.start_method),
        make("td", { class: "number" }, row.workers ? row.prefetch_factor : ""),
        row.trouble ? make("td", { colspan: 4 }, row.trouble) : [
          make("td", { class: "number" }, short(row.rate)),
          make("td", { class: "number" }, row.error === null ? "" : `±${percent(row.error)}`),
          make("td", { class: "number" }, span(row.first_batch_seconds)),
          make("td", { class: "number" }, row.kind === "processes" ? bytes(row.worker_bytes) : "")])))));
  }

  /** Rates by number of workers, a line for each kind of them. */
  function tuningChart(one, at) {
    const place = document.getElementById(`chart-tuning-${at}`);
    const rows = one.tried.filter((row) => row.rate > 0 && row.prefetch_factor === 2 && !row.step_seconds);
    const first = rows.find((row) => row.kind === "processes");
    const kinds = [["processes", (row) => row.kind === "main" || row.kind === "processes"
      && row.start_method === first.start_method], ["threads", (row) => row.kind === "threads"]];
    const lines = kinds.map(([name, belongs]) => [name, new Map(rows.filter(belongs)
      .map((row) => [row.workers, row.rate]))]).filter(([, points]) => points.size > 0);
    const counts = [...new Set(rows.map((row) => row.workers))].sort((a, b) => a - b);
    if (counts.length < 2) { place.remove(); return; }
    const note = make("span", { class: "note" }, "");
    const told = (number) => `${many(counts[number], "worker")}: ${lines.filter(([, points]) =>
      points.has(counts[number])).map(([name, points]) => `${name} ${short(points.get(counts[number]))}`)
      .join(", ")} ${one.unit} a second`;
    const plot = new uPlot({
      width: place.clientWidth || 600, height: 220, legend: { show: false },
      cursor: { drag: { x: true, y: false }, points: { size: 7 } },
      scales: { x: { time: false }, y: { range: (_, low, high) => [0, high > 0 ? high * 1.08 : 1] } },
      axes: [{ ...axis((value) => Number.isInteger(value) ? grouped(value) : ""), size: 34, incrs: [1, 2, 4, 8, 16, 32] },
        axis(short)],
      series: [{}, ...lines.map(([name], line) => ({ label: name, stroke: colour(`--c${line}`), width: 2,
        spanGaps: true, points: { show: true, size: 7 } }))],
      hooks: { setCursor: [(self) => {
        const index = self.cursor.idx;
        note.textContent = index === null || index === undefined || self.cursor.left < 0 ? "" : told(index);
      }] },
    }, [counts, ...lines.map(([, points]) => counts.map((count) => points.has(count) ? points.get(count) : null))], place);
    place.setAttribute("aria-label", `${one.unit} a second by number of workers. ${counts.map((_, number) =>
      told(number)).join("; ")}. Arrow keys move from point to point.`);
    place.addEventListener("keydown", (event) => {
      const move = { ArrowLeft: -1, ArrowRight: 1 }[event.key];
      if (!move) return;
      const to = Math.max(0, Math.min(counts.length - 1, (plot.cursor.idx ?? -1) + move));
      plot.setCursor({ left: plot.valToPos(counts[to], "x"), top: 10 });
      say(told(to));
      event.preventDefault();
    });
    place.append(make("div", { class: "keys" }, ...lines.map(([name], line) => make("span", {},
      make("span", { class: "swatch", colour: `--c${line}` }), name)),
    make("span", { class: "soft" }, `${one.unit} a second, by number of workers`)),
    make("div", { class: "under" }, note));
    charts.push({ plot, place, time: false });
  }

  // -- the rest --------------------------------------------------------------------------

  const EVENTS = {
    recycled: "Workers were replaced because they had grown",
    pressure: "Memory ran short, and fewer batches were kept in flight",
    smaller: "Fewer batches were ordered after a death for lack of memory",
    "not-recycled": "Workers that had grown were not replaced",
    "started-late": "There was no memory for a worker, and it was started later",
    "held-back": "Batches were held back by the memory budget",
  };

  function eventsPart() {
    const events = story.events.map((one) => ({ ...one, first: one.first.filter(fits) }))
      .filter((one) => one.first.length > 0);
    const leaks = story.leaks.filter(fits);
    if (events.length === 0 && leaks.length === 0) return null;
    const line = (one) => make("li", {}, make("span", { class: "soft small" }, `${when(one.time)} `,
      whose(one) && `[${whose(one)}] `), one.text);
    return part("events", "What else happened", null,
      leaks.length > 0 && [make("h3", {}, "Memory that piles up"),
        make("div", {}, ...leaks.map((one) => make("pre", {}, one.text)))],
      ...events.map((one) => fold(`event ${one.event}`, { class: "fold" },
        make("summary", {}, `${EVENTS[one.event] || one.event}: ${one.count === 1 ? "once"
          : `${grouped(one.count)} times`}`),
        make("ul", { class: "plain" }, ...one.first.map(line)),
        one.count > one.first.length && make("p", { class: "soft small" }, "The first of them."))));
  }

  function setupPart() {
    const list = (values) => make("dl", {}, ...Object.entries(values).flatMap(([name, value]) =>
      [make("dt", {}, name), make("dd", { class: "mono" }, value)]));
    const found = story.loaders.filter(fits);
    return part("setup", "Versions and options", null, ...found.map((one, at) => fold(`setup ${at}`,
      { class: "card mild" },
      make("summary", {}, make("strong", {}, one.loader || "a loader"),
        manyRanks() && ` – rank ${one.rank}`, make("span", { class: "soft" },
          ` – ${["holdfast", "torch", "python"].filter((name) => one.versions[name])
            .map((name) => `${name} ${one.versions[name]}`).join(", ")}${one.host ? `, on ${one.host}` : ""}${
            one.times > 1 ? `, ${one.times} times` : ""}`)),
      make("div", {}, make("div", { class: "two" },
        make("div", {}, make("h3", {}, "Options"), list(one.options)),
        make("div", {}, make("h3", {}, "Versions"), list(one.versions),
          one.command.length > 0 && [make("h3", {}, "Command"), make("pre", {}, one.command.join(" "))],
          make("h3", {}, "Machine"), list(one.machine)))))));
  }

  function foot() {
    return make("p", {}, `Made ${day(story.made)} ${clock(story.made)} by holdfast ${story.version}. `,
      live ? "It is brought up to date while the run is going on. " : "Everything is in this one file. ",
      story.damaged > 0 && `${many(story.damaged, "line")} of the logbook ${
        story.damaged === 1 ? "was" : "were"} left out: incomplete, because the writer was ended, or no record.`);
  }

  // -- all of it -------------------------------------------------------------------------

  function draw() {
    const at = scrollY;
    const focus = placeOfFocus();
    for (const one of charts) one.plot.destroy();
    charts = [];
    colours.clear();
    document.getElementById("head").replaceChildren(...head().filter(Boolean));
    const parts = onlyTuning() ? [tuningPart(), setupPart()] : [verdict(), tiles(), timePart(), memoryPart(),
      samplesPart(), incidentsPart(), badPart(), eventsPart(), tuningPart(), setupPart()];
    document.getElementById("main").replaceChildren(...parts.filter(Boolean));
    document.getElementById("foot").replaceChildren(foot());
    const hint = `Drag over a part to enlarge it in all charts.${marks().length > 0
      ? " Point at a marker to read what happened, click it for more." : ""}`;
    timeChart("rate", flowLines("samples"), short, { label: "Samples a second over time", height: 200, hint });
    const shared = () => [0, 1];
    timeChart("waiting", flowLines("waiting"), percent,
      { label: "Share of time in which the trainer waited", range: shared, height: 180, size: 52 });
    timeChart("steps", stepLines(), percent,
      { label: "What workers did, as shares of their time", range: shared, height: 180, size: 52 });
    for (const rank of story.memory) {
      const lines = memoryLines(rank);
      hideFarLimit(rank.rank, lines);
      timeChart(`memory-${rank.rank}`, lines, bytes,
        { label: `Memory${manyRanks() ? ` of rank ${rank.rank}` : ""} over time`, height: 280, size: 80, hint, bridged: true });
    }
    story.distributions.filter(fits).filter((one) => one.measured > 0).slice(0, 12).forEach((one, number) => {
      bars(`times-${number}`, one.times, span, "Time to load a sample");
      bars(`sizes-${number}`, one.sizes, bytes, "Size of a sample");
    });
    story.tuning.forEach(tuningChart);
    if (view.range !== null) zoom(view.range);
    returnFocus(focus);
    scrollTo(0, at);
  }

  /** Where the focus is, as the number of each element among its siblings. */
  function placeOfFocus() {
    const main = document.getElementById("main"), path = [];
    let one = document.activeElement;
    if (!one || one === main || !main.contains(one)) return null;
    const tag = one.tagName;
    for (; one !== main; one = one.parentElement) path.unshift([...one.parentElement.children].indexOf(one));
    return { path, tag };
  }

  function returnFocus(place) {
    if (place === null) return;
    let one = document.getElementById("main");
    for (const number of place.path) one = one && one.children[number];
    if (one && one.tagName === place.tag) one.focus({ preventScroll: true });
  }

  let width = innerWidth;
  addEventListener("resize", () => {
    if (innerWidth === width) return;
    width = innerWidth;
    for (const { plot, place } of charts) plot.setSize({ width: place.clientWidth, height: plot.height });
  });
  // Paper is light, whatever the screen is.
  for (const media of ["(prefers-color-scheme: dark)", "print"]) {
    matchMedia(media).addEventListener("change", draw);
  }
  addEventListener("beforeprint", () => {
    for (const one of document.querySelectorAll("details.card")) one.open = true;
  });

  draw();
  // A link to a card, from a bookmark.
  const wanted = /^#incident-(\d+)$/.exec(location.hash);
  if (wanted && story.incidents[Number(wanted[1])]) show(story.incidents[Number(wanted[1])]);

  if (live) {
    let mark = null, pressed = false;
    addEventListener("pointerdown", () => { pressed = true; });
    addEventListener("pointerup", () => { pressed = false; });
    const ask = async () => {
      try {
        const answer = await fetch("data.json", { cache: "no-store", headers: mark ? { "If-None-Match": mark } : {} });
        if (answer.status === 200) {
          const seen = answer.headers.get("ETag"), fresh = await answer.json();
          // Not in the middle of what someone does: the next answer comes soon.
          if (!pressed && document.activeElement?.id !== "bad-search") {
            mark = seen;
            story = { ...fresh, live };
            draw();
          }
        }
      } catch {
        const state = document.getElementById("state");
        state.textContent = "no longer brought up to date: holdfast report has ended";
        state.className = "badge warn";
        return;
      }
      setTimeout(ask, live * 1000);
    };
    setTimeout(ask, live * 1000);
  }
})();
