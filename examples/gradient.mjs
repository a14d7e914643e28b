// A gradient from JavaScript alone, in Node 20 or newer or as a module in a browser's page.
//
// Put the box's address and a token of it in the first line. The box serves the tutorial's `digits`;
// docs/wire.md has the formats. It prints the loss, the shape of a gradient, and its numbers.
const url = "http://127.0.0.1:8642", token = "gbx_…";

async function call(method, path, { body, headers } = {}) {
  const sent = { Authorization: `Bearer ${token}`, ...headers };
  const answer = await fetch(url + path, { method, body, headers: sent });
  if (!answer.ok) throw new Error((await answer.json()).detail);
  return answer;
}

function safetensors(tensors) {
  const header = {}, numbers = [];
  let end = 0;
  for (const [name, { dtype, shape, data }] of Object.entries(tensors)) {
    const data_offsets = [end, (end += data.byteLength)];
    header[name] = { dtype, shape, data_offsets };
    numbers.push(data);
  }
  const json = new TextEncoder().encode(JSON.stringify(header));
  const length = new BigUint64Array([BigInt(json.length)]);
  return new Blob([length, json, ...numbers]);
}

const images = new Float64Array(16 * 64).map(() => Math.random());
const labels = new BigInt64Array(16).map((_, index) => BigInt(index % 10));
const half = (from) => images.subarray(from * 64, (from + 8) * 64);
const inputs = safetensors({
  "0/0": { dtype: "F64", shape: [8, 64], data: half(0) }, // shard 0, argument 0
  "1/0": { dtype: "F64", shape: [8, 64], data: half(8) },
  labels: { dtype: "I64", shape: [16], data: labels },
});
const bytes = await inputs.arrayBuffer();
const hash = new Uint8Array(await crypto.subtle.digest("SHA-256", bytes));
const blob = [...hash].map((b) => b.toString(16).padStart(2, "0")).join("");

const form = new FormData();
form.append("job", JSON.stringify({
  protocol: 1, computation: "gradient", model: "digits",
  inputs: [{ shards: [{ blob, prefix: "0/" }, { blob, prefix: "1/" }] }],
  loss: { kind: "builtin", name: "cross_entropy" },
  loss_inputs: { labels: { blob, tensor: "labels" } },
}));
form.append(blob, inputs);
const headers = { Prefer: "wait=30" };
const once = { ...headers, "Idempotency-Key": crypto.randomUUID() };
let answer = await call("POST", "/v1/jobs", { body: form, headers: once });
let job = await answer.json();
while (job.state === "queued" || job.state === "running") {
  job = await (await call("GET", `/v1/jobs/${job.id}`, { headers })).json();
}
if (job.state !== "done") throw new Error(job.error?.detail ?? job.state);

answer = await call("GET", `/v1/jobs/${job.id}/result`);
const file = await answer.arrayBuffer();
const begin = 8 + Number(new DataView(file).getBigUint64(0, true));
const header = JSON.parse(new TextDecoder().decode(file.slice(8, begin)));
const receipt = JSON.parse(header.__metadata__.gradbox);
const { shape, data_offsets: [from, to] } = header["grads/0.weight"];
const gradient = new Float64Array(file.slice(begin + from, begin + to));
console.log(receipt.loss, shape, gradient);
