// k6 against a Forebay gateway: constant arrival rate, errors and time to headers.
//
//   k6 run -e URL=http://127.0.0.1:8080 -e RATE=5 -e DURATION=60s loadtests/scripts/k6.js
//
// k6 reads a streamed answer as one body: it can tell the time to the first byte (`http_req_waiting`; a gateway that
// holds headers until the first content makes this its TTFT) and the end, but neither TPOT nor what came when. A rate
// it cannot keep shows in `dropped_iterations`; any of those means the numbers are too good. Goodput: `forebay replay`.
import http from "k6/http";
import { check } from "k6";
import { Counter, Trend } from "k6/metrics";

const URL = __ENV.URL || "http://127.0.0.1:8080";
const KEY = __ENV.FOREBAY_API_KEY;
const MAX_TOKENS = Number(__ENV.MAX_TOKENS || 64);
const SYSTEM = "You answer questions about water engineering in one paragraph. ".repeat(40);

export const options = {
  scenarios: {
    chat: {
      executor: "constant-arrival-rate",
      rate: Number(__ENV.RATE || 5),
      timeUnit: "1s",
      duration: __ENV.DURATION || "60s",
      preAllocatedVUs: 50,
      maxVUs: 2000,
    },
  },
  thresholds: { checks: ["rate>0.99"], dropped_iterations: ["count==0"] },
};

const firstByte = new Trend("first_byte_ms", true);
const shed = new Counter("shed");

export function setup() {
  const models = http.get(`${URL}/v1/models`, { headers: headers() });
  return { model: __ENV.MODEL || models.json("data.0.id") };
}

export default function (data) {
  const body = {
    model: data.model,
    messages: [
      { role: "system", content: SYSTEM },
      { role: "user", content: `Question ${__VU}-${__ITER}: why do rivers meander?` },
    ],
    max_tokens: MAX_TOKENS,
    stream: true,
  };
  const answer = http.post(`${URL}/v1/chat/completions`, JSON.stringify(body), { headers: headers(), timeout: "300s" });
  if (answer.status === 429) {
    shed.add(1);
    return;
  }
  check(answer, {
    "status is 200": (r) => r.status === 200,
    "the stream ended as it should": (r) => r.body && r.body.trimEnd().endsWith("data: [DONE]"),
    "no error inside": (r) => r.body && !r.body.includes('"error":'),
    "not aborted": (r) => r.body && !r.body.includes('"finish_reason":"abort"'),
  });
  firstByte.add(answer.timings.waiting);
}

function headers() {
  const named = { "Content-Type": "application/json" };
  return KEY ? { ...named, Authorization: `Bearer ${KEY}` } : named;
}
