// Calls to the service, and its problems: every error has a title, a detail and who can help.

/** An RFC 9457 problem, thrown. */
export class Problem extends Error {
  constructor(document) {
    super(document.detail);
    this.title = document.title;
    this.status = document.status;
    this.category = document.category;
    this.requestId = document.request_id;
  }
}

/** Call the service; returns the body, read if it is JSON, or null where there is none. Throws a Problem. */
export async function call(method, path, body) {
  const headers = { "X-Gradbox-Dashboard": "1" };
  if (body !== undefined) headers["Content-Type"] = "application/json";
  let answer;
  try {
    answer = await fetch(path, { method, headers, body: body === undefined ? undefined : JSON.stringify(body) });
  } catch {
    throw new Problem({
      title: "The box does not answer",
      detail: "The connection failed before an answer came. If the box restarts, this page goes on by itself.",
      status: 0,
      category: "transient",
    });
  }
  if (answer.status === 204) return null;
  if (answer.ok) return answer.headers.get("Content-Type").startsWith("text/") ? answer.text() : answer.json();
  throw new Problem(await described(answer));
}

async function described(answer) {
  try {
    const found = await answer.json();
    if (found.title && found.detail) return found;
  } catch {
    // A proxy in between answers in a form of its own.
  }
  return { title: `The answer is ${answer.status}`, detail: "Something between this page and the box refused.", status: answer.status, category: "server" };
}

export const get = (path) => call("GET", path);
