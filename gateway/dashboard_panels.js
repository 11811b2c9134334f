// The panels: one snapshot in, the document brought up to date.

import {
  count, find, known, list, make, none, pairs, percent, rate, seconds, span, spark, style, table, words, write,
} from "/dashboard/draw.js";

const opened = new Set();

const attained = (x, target) => (!known(x) || x >= target ? "" : x < 0.9 ? "wrong" : "warn");

function totals(now, history) {
  const t = now.total;
  const rows = [
    ["good", rate(t.good_rps), "/s", (p) => p.total.good_rps, ""],
    ["offered", rate(t.offered_rps), "/s", (p) => p.total.offered_rps, ""],
    ["attainment", percent(t.attainment), "", (p) => p.total.attainment, attained(t.attainment, now.target), 1],
    ["shed", rate(t.shed_rps), "/s", (p) => p.total.shed_rps, t.shed_rps > 0 ? "warn" : ""],
    ["late or failed", rate(t.late_rps), "/s", (p) => p.total.late_rps, t.late_rps > 0 ? "warn" : ""],
    ["open", count(now.open), "", (p) => p.open, ""],
    ["held", count(now.held), now.held ? `oldest ${seconds(now.oldest_wait_s)}` : "", (p) => p.held, ""],
    ["output", count(t.output_tps), "tokens/s", (p) => p.total.output_tps, ""],
    ["prompt from cache", percent(t.reuse, 0), "", (p) => p.total.reuse, "", 1],
  ];
  const at = find("totals");
  rows.forEach(([name, value, unit, line, className, most], i) => {
    let box = at.children[i];
    if (!box) {
      box = make("div", "total");
      const number = make("div", "value");
      number.append(make("span"), make("span", "unit"));
      box.append(make("div", "name", name), number);
      at.append(box);
    }
    write(box.children[1].firstChild, value);
    style(box.children[1].firstChild, className);
    write(box.children[1].lastChild, unit);
    spark(box, history.map(line), `${name} over the last ${span(history.length)}`, most);
  });
}

function state(r) {
  if (r.phase === "out") {
    return { text: `out: ${words(r.reason || "ejected")}`, className: "wrong", sub: r.back_in_s >= 1 ? `tried again in ${span(r.back_in_s)}` : "" };
  }
  if (r.draining) return { text: "draining", className: "warn" };
  if (r.phase === "starting") return { text: "starting", className: "warn", sub: r.reason && r.reason !== "starting" ? words(r.reason) : "" };
  if (r.phase === "half_open") return { text: "on trial", className: "warn" };
  return { text: "in rotation", className: "quiet", sub: "" };
}

function fleet(now, history) {
  const kv = (r) => {
    if (!known(r.kv_free_tokens)) return { text: none };
    const share = r.kv_capacity_tokens ? r.kv_free_tokens / r.kv_capacity_tokens : 0;
    return {
      text: count(r.kv_free_tokens),
      bar: r.kv_capacity_tokens ? 1 - share : null,
      barClass: share < 0.05 ? "wrong" : "",
      title: `${r.kv_free_tokens} of ${r.kv_capacity_tokens} tokens are free; the bar is what is taken`,
    };
  };
  const most = Math.max(1, ...history.flatMap((p) => Object.values(p.in_flight)));
  const pace = (r) => ({
    text: percent(r.pace_rate, 0),
    sub: r.pace_closed_share >= 0.005 ? `shut ${percent(r.pace_closed_share, 0)}` : "",
    title: "share of its time that may go to prefill, and how often it was shut lately",
  });
  const quiet = (value) => (r) => (r.phase === "out" ? { ...(typeof value(r) === "object" ? value(r) : { text: value(r) }), className: "quiet" } : value(r));
  const age = (r) => ({ text: known(r.scrape_age_s) ? span(r.scrape_age_s) : none, className: r.scrape_age_s > 10 ? "wrong" : "quiet" });
  table(
    "replicas",
    [
      ["replica", "id", (r) => ({ text: r.id, title: `${r.url} ${r.models.join(", ")}` })],
      ["state", "wide", state],
      ["in flight", "n", (r) => count(r.in_flight)],
      ["last minutes", "spark wide", (r) => ({ line: history.map((p) => p.in_flight[r.id]), most, label: `in flight at ${r.id}` })],
      ["engine runs", "n", quiet((r) => ({ text: count(r.running), sub: r.waiting ? `+${count(r.waiting)} wait` : "" }))],
      ["prefill backlog", "n wide", (r) => ({ text: r.backlog_tokens ? seconds(r.backlog_s) : "0", sub: r.backlog_tokens ? `${count(r.backlog_tokens)} tokens` : "" })],
      ["KV free", "n wide", quiet(kv)],
      ["from cache", "n", quiet((r) => percent(r.reuse, 0))],
      ["prefill pace", "n", quiet(pace)],
      ["tokens/s", "n", quiet((r) => ({ text: count(r.prefill_rate), title: "prefill speed as learnt" }))],
      ["scraped", "n", age],
    ],
    now.replicas,
    (r) => r.id,
    "No replica is known: add one with POST /admin/fleet.",
  );
}

function classes(now, history) {
  const bound = (p50, p95, objective, met) => (c) => ({
    text: known(c[p50]) ? `${seconds(c[p50])} / ${seconds(c[p95])}` : none,
    sub: known(c[objective]) ? `of ${seconds(c[objective])}` : "",
    className: known(c[met]) && c[met] < now.target ? (c[met] < 0.9 ? "wrong" : "warn") : "",
    title: known(c[met]) ? `${percent(c[met])} within their own bound` : "",
  });
  table(
    "classes",
    [
      ["class", "id", (c) => c.name],
      ["offered/s", "n", (c) => rate(c.offered_rps)],
      ["good/s", "n", (c) => rate(c.good_rps)],
      ["shed/s", "n", (c) => ({ text: rate(c.shed_rps), className: c.shed_rps > 0 ? "warn" : "" })],
      ["late/s", "n", (c) => ({ text: rate(c.late_rps), className: c.late_rps > 0 ? "warn" : "" })],
      ["attainment", "n", (c) => ({ text: percent(c.attainment), className: attained(c.attainment, now.target) })],
      ["last minutes", "spark wide", (c) => ({ line: history.map((p) => p.classes[c.name]), most: 1, label: `attainment of ${c.name}` })],
      ["TTFT p50 / p95", "n wide", bound("ttft_p50_s", "ttft_p95_s", "ttft_objective_s", "ttft_met")],
      ["TPOT p50 / p95", "n wide", bound("tpot_p50_s", "tpot_p95_s", "tpot_objective_s", "tpot_met")],
      ["held", "n", (c) => count(c.held)],
    ],
    now.classes,
    (c) => c.name,
  );
  write(find("window"), `requests that ended in the last ${span(now.window_s)}`);
}

function queue(now) {
  const held = now.classes.filter((c) => c.held).map((c) => `${c.held} ${c.name}`).join(", ");
  pairs(find("queue"), [
    ["held", held || "none"],
    ["longest wait", now.held ? seconds(now.oldest_wait_s) : none],
    ["bytes held", count(now.held_bytes)],
    ["conversations", `${count(now.working_set_tokens)} tokens${now.working_set_enforced ? ", new ones wait for room" : ""}`],
    ["prediction error", percent(now.prediction_error, 0)],
    ["event loop late by", seconds(now.loop_lag_s), now.overloaded ? "wrong" : ""],
  ]);
}

function experiment(now) {
  const e = now.experiment;
  const there = Boolean(e && e.arms && e.arms.length);
  find("experiment").hidden = !there;
  if (!there) return;
  write(find("experiment-about"), `${e.name}: ${e.design}, ${e.state} for ${span(e.elapsed_s)}${e.gateways ? ` at ${e.gateways} gateways` : ""}${e.ended_why ? `, ${e.ended_why}` : ""}; 95 % intervals that may be looked at any time`);
  const points = (x) => `${x > 0 ? "+" : ""}${(100 * x).toFixed(1)}`;
  const most = Math.max(0.02, ...e.arms.flatMap((a) => (a.difference && known(a.difference.low) ? [Math.abs(a.difference.low), Math.abs(a.difference.high)] : [])));
  const difference = (a) => {
    if (a.control) return { text: "control", className: "quiet" };
    const d = a.difference;
    if (!d) return { text: "not enough yet", className: "quiet" };
    const bounds = known(d.low) ? ` (${points(d.low)} to ${points(d.high)})` : "";
    return { text: `${points(d.estimate)} points${bounds}`, className: d.excludes_zero && d.estimate < 0 ? "wrong" : "", interval: { ...d, most } };
  };
  table(
    "arms",
    [
      ["arm", "id", (a) => ({ text: a.name, sub: a.policy === "running" ? now.policy : a.policy })],
      ["state", "wide", (a) => ({ text: a.state, className: a.state === "stopped" ? "wrong" : "quiet", sub: a.stopped_why })],
      ["weight", "n", (a) => rate(a.weight)],
      ["requests", "n", (a) => ({ text: count(a.requests), sub: a.requests || !a.watched.requests ? "" : `${count(a.watched.requests)} watched, ${percent(a.watched.attainment)} good` })],
      ["attainment", "n wide", (a) => ({ text: percent(a.attainment), sub: a.attainment_interval ? `${percent(a.attainment_interval[0])} to ${percent(a.attainment_interval[1])}` : "" })],
      ["goodput/s", "n", (a) => rate(a.goodput_rps)],
      ["difference in attainment", "wide", difference],
    ],
    e.arms,
    (a) => a.name,
  );
  list(find("experiment-notes"), (e.notes ?? []).map((text) => [text]));
}

function shadows(now) {
  find("shadow").hidden = !now.shadows.length;
  const signed = (text, x) => (x > 0 ? `+${text(x)}` : x < 0 ? `−${text(-x)}` : "0");
  table(
    "shadows",
    [
      ["policy", "id", (s) => s.policy],
      ["asked", "n", (s) => count(s.asked)],
      ["same choice", "n", (s) => percent(s.agreed)],
      ["uncached tokens, each", "n wide", (s) => signed(count, s.uncached_tokens)],
      ["TTFT, each", "n wide", (s) => signed(seconds, s.ttft_s)],
    ],
    now.shadows,
    (s) => s.policy,
  );
}

function prefixes(now) {
  const p = now.prefixes;
  find("prefixes").hidden = !p;
  if (!p) return;
  const lost = p.leaks.reduce((sum, l) => sum + l.lost_tokens_per_hour, 0);
  write(find("prefixes-about"), p.leaks.length ? `${p.known} found; ${count(lost)} prompt tokens an hour are computed again because of what stands in front of them` : `${p.known} found; nothing keeps them from being shared`);
  const several = new Set(p.families.map((f) => f.model)).size > 1;
  const name = (family, model) => ({ text: family, sub: several ? model : "" });
  find("leaks").hidden = !p.leaks.length;
  table(
    "leaks",
    [
      ["family", "id", (l) => name(l.family, l.model)],
      ["what changes", "", (l) => words(l.kind)],
      ["where", "wide", (l) => ({ text: l.path, sub: `byte ${l.offset}` })],
      ["requests/h", "n", (l) => count(l.requests_per_hour)],
      ["lost each", "n", (l) => ({ text: count(l.lost_tokens_per_request), sub: "tokens" })],
      ["lost/h", "n", (l) => ({ text: count(l.lost_tokens_per_hour), className: "warn", sub: l.lost_error >= 0.05 ? `± ${percent(2 * l.lost_error)}` : "" })],
      ["what to do", "wide", (l) => l.advice],
    ],
    p.leaks,
    (l) => `${l.family} ${l.kind} ${l.path} ${l.offset}`,
  );
  find("families-all").hidden = !p.families.length;
  if (!find("families-all").open) return;
  table(
    "families",
    [
      ["family", "id", (f) => name(f.id, f.model)],
      ["tenant", "", (f) => f.tenant ?? none],
      ["requests/h", "n", (f) => count(f.requests_per_hour)],
      ["prompt/h", "n", (f) => count(f.prompt_tokens_per_hour)],
      ["in common", "n", (f) => count(f.common_tokens)],
      ["from cache", "n", (f) => ({ text: percent(f.reuse, 0), bar: f.reuse ?? 0 })],
      ["could be", "n", (f) => percent(f.ceiling, 0)],
      ["without leaks", "n", (f) => percent(f.ceiling_without_leaks, 0)],
    ],
    p.families,
    (f) => f.id,
  );
}

function notable(now) {
  const rows = now.notable;
  write(find("notable-about"), rows.length ? "the last ones" : "");
  const why = (r) => {
    const texts = { slow_ttft: "first token late", slow_tpot: "tokens slow", slow_itl: "gap too long", slow_e2e: "past its deadline", rejected: "refused", truncated: "cut off", error_http: "failed", error_transport: "failed" };
    return { text: texts[r.partition] ?? words(r.partition ?? "ended"), sub: r.reason ? words(r.reason) : "" };
  };
  table(
    "notable",
    [
      ["request", "id", () => ""],
      ["ended", "n", (r) => `${span(r.ago_s)} ago`],
      ["what", "wide", why],
      ["class", "", (r) => r.service_class],
      ["replica", "wide", (r) => (r.replicas.length ? { text: r.replicas.join(" → "), sub: words(r.choice) } : { text: "not sent", className: "quiet" })],
      ["prompt", "n", (r) => (known(r.prompt_tokens) ? `${count(r.prompt_tokens)} tokens` : `${count(r.prompt_bytes)} bytes`)],
      ["waited", "n", (r) => seconds(r.queue_wait_s)],
      ["TTFT", "n", (r) => ({ text: seconds(r.ttft_s), sub: known(r.ttft_objective_s) ? `of ${seconds(r.ttft_objective_s)}` : "", className: r.ttft_s > r.ttft_objective_s && known(r.ttft_objective_s) ? "warn" : "" })],
      ["TPOT", "n", (r) => ({ text: seconds(r.tpot_s), sub: known(r.tpot_objective_s) ? `of ${seconds(r.tpot_objective_s)}` : "", className: r.tpot_s > r.tpot_objective_s && known(r.tpot_objective_s) ? "warn" : "" })],
    ],
    rows,
    (r) => r.request_id,
    "None so far.",
    detail,
  );
}

function detail(r, row, before) {
  const box = row.firstChild.firstChild;
  let button = box.querySelector("button");
  if (!button) {
    button = make("button", "open", r.request_id.length > 12 ? `…${r.request_id.slice(-8)}` : r.request_id);
    button.type = "button";
    button.title = r.request_id;
    button.addEventListener("click", () => {
      if (!opened.delete(r.request_id)) opened.add(r.request_id);
      unfold(r, row, button);
    });
    box.append(button);
  }
  button.setAttribute("aria-expanded", String(opened.has(r.request_id)));
  return opened.has(r.request_id) ? (before ?? details(r)) : null;
}

function unfold(r, row, button) {
  const open = opened.has(r.request_id);
  button.setAttribute("aria-expanded", String(open));
  if (open) row.after(Object.assign(details(r)));
  else row.nextSibling?.classList.contains("more") && row.nextSibling.remove();
}

function details(r) {
  const row = make("tr", "more");
  row.dataset.key = `${r.request_id} more`;
  const td = make("td");
  td.colSpan = 9;
  const facts = make("dl");
  pairs(facts, [
    ["request", r.request_id],
    ["model", r.model || none],
    ["tenant", r.tenant ?? none],
    ["status", r.status ? String(r.status) : "the client left"],
    ["predicted TTFT from dispatch", seconds(r.predicted_ttft_s)],
    ["cached", known(r.cached_tokens) ? `${count(r.cached_tokens)} tokens` : none],
    ["output", known(r.completion_tokens) ? `${count(r.completion_tokens)} tokens` : none],
    ["longest gap", seconds(r.longest_gap_s)],
    ["whole", seconds(r.e2e_s)],
  ]);
  td.append(facts);
  if (r.alternatives.length) {
    const others = make("table");
    td.append(others);
    table(
      others,
      [
        ["considered", "id", (a) => a.replica_id],
        ["predicted TTFT", "n", (a) => seconds(a.predicted_ttft_s)],
        ["cached", "n", (a) => `${count(a.cached_tokens)} tokens`],
        ["score", "n", (a) => (known(a.score) ? a.score.toFixed(3) : none)],
      ],
      r.alternatives,
      (a) => a.replica_id,
    );
  } else td.append(make("p", "quiet", "No other replica was considered."));
  row.append(td);
  return row;
}

function wrongs(now) {
  const rows = [];
  if (now.draining) rows.push(["The gateway is shutting down: new requests are refused.", ""]);
  if (now.overloaded) rows.push(["The gateway's event loop lags: sheddable requests are refused.", ""]);
  for (const r of now.replicas) {
    if (r.phase === "out") rows.push([`${r.id} is out of rotation: ${words(r.reason || "ejected")}.`, ""]);
    else if (r.phase === "starting" && now.uptime_s > 5) rows.push([`${r.id} has not answered yet: ${words(r.reason)}.`, "warn"]);
  }
  if (now.replicas.length && !now.replicas.some((r) => r.available)) rows.unshift(["No replica is available: every request is refused.", ""]);
  list(find("wrong"), rows.slice(0, 8));
  const title = rows.length ? `(${rows.length}) Forebay` : "Forebay";
  if (document.title !== title) document.title = title;
}

export function draw(now, history) {
  write(find("about"), `${now.policy} · ${now.replicas.filter((r) => r.available).length} of ${now.replicas.length} replicas · configuration ${now.config_version} · up ${span(now.uptime_s)} · ${now.version}`);
  wrongs(now);
  totals(now, history);
  fleet(now, history);
  classes(now, history);
  queue(now);
  experiment(now);
  shadows(now);
  prefixes(now);
  notable(now);
}
