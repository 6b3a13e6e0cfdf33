"use strict";

// Both engines answer `ask(path, question)` with { status, body }, as HTTP does.

// The server that the page came from.
const overHTTP = () => {
  const token = new URLSearchParams(location.search).get("token") ?? "";
  return async (path, question) => {
    const headers = { Authorization: `Bearer ${token}` };
    const sent = question === undefined ? { headers } : {
      method: "POST", headers: { ...headers, "Content-Type": "application/json" }, body: JSON.stringify(question),
    };
    const reply = await fetch(path, { ...sent, cache: "no-store", credentials: "omit", redirect: "error" });
    return { status: reply.status, body: await reply.json() };
  };
};

// A web worker with Python in it. It does one thing at a time, and nothing interrupts it: of several
// programs that wait only the newest is compiled, and a worker that takes too long for one that is no
// longer wanted is ended. `tell` is called with what the worker is at until it is ready.
const inWorker = (tell) => {
  const JOBS = ["/compile", "/views", "/compare", "/search"]; // what takes long; the rest is answered between
  const PATIENCE = 20000; // milliseconds, of which none count while the worker loads
  const superseded = { status: 409, body: { error: "superseded by a newer question" } };
  let worker = null;
  let isLoading = false;
  let last = 0;
  let compiling = 0; // the number of the job under way
  let waiting = null; // the newest job that waits for it: { path, question, done }
  const asked = new Map(); // what is done with the answer, by the number of the question

  const start = () => {
    worker = new Worker(new URL("play/worker.mjs", location.href), { type: "module" });
    isLoading = true;
    worker.addEventListener("message", ({ data }) => {
      if (data.progress !== undefined) tell(data.progress);
      else if (data.ready) isLoading = false;
      else if (data.failed !== undefined) end(data.failed);
      else finish(data.id, { status: data.reply[0], body: data.reply[1] });
    });
    worker.addEventListener("error", (event) => end(event.message || "its files are not all there"));
  };
  const end = (why) => {
    worker.terminate();
    [worker, compiling] = [null, 0];
    for (const id of [...asked.keys()]) finish(id, { status: 0, body: { error: `Python in the browser has stopped: ${why}` } });
  };
  const finish = (id, reply) => {
    asked.get(id)?.(reply);
    asked.delete(id);
    if (id === compiling) compiling = 0;
    if (compiling || !waiting) return;
    const { path, question, done } = waiting;
    waiting = null;
    compiling = post(path, question, done);
  };
  const post = (path, question, done) => {
    if (!worker) start();
    last += 1;
    asked.set(last, done);
    worker.postMessage({ id: last, path, question: JSON.stringify(question) });
    return last;
  };
  const endIfSlow = (id) => setTimeout(() => {
    if (compiling !== id) return;
    if (isLoading) endIfSlow(id);
    else end("it took too long");
  }, PATIENCE);
  return (path, question) => new Promise((done) => {
    if (!JOBS.includes(path)) return post(path, question, done);
    if (!compiling) return (compiling = post(path, question, done));
    waiting?.done(superseded);
    waiting = { path, question, done };
    endIfSlow(compiling);
  });
};
