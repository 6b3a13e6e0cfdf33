// A program in an address: JSON, compressed by DEFLATE, in the base64 of addresses.

const MOST_COLUMNS = 6; // that are compared with the present layout
const SHARED_VIEWS = ["devices", "time", "compare", "emitted"]; // that an address may open; a search is not in it
const LONGEST = 1 << 20; // bytes of a program that is read from an address

const through = async (bytes, stream) => {
  const chunks = [];
  let count = 0;
  const reader = new Blob([bytes]).stream().pipeThrough(stream).getReader();
  for (let read = await reader.read(); !read.done; read = await reader.read()) {
    chunks.push(read.value);
    count += read.value.length;
    if (count > LONGEST) throw new RangeError("too long");
  }
  return new Uint8Array(await new Blob(chunks).arrayBuffer());
};
const packed = async (value) => {
  const bytes = await through(JSON.stringify(value), new CompressionStream("deflate-raw"));
  const letters = Array.from(bytes, (byte) => String.fromCharCode(byte)).join("");
  return btoa(letters).replaceAll("+", "-").replaceAll("/", "_").replaceAll("=", "");
};
const unpacked = async (code) => {
  const letters = atob(code.replaceAll("-", "+").replaceAll("_", "/"));
  const bytes = Uint8Array.from(letters, (letter) => letter.charCodeAt(0));
  return JSON.parse(new TextDecoder().decode(await through(bytes, new DecompressionStream("deflate-raw"))));
};

const areColumns = (found) => Array.isArray(found) && found.length <= MOST_COLUMNS
  && found.every((one) => ["layout", "sbp"].includes(one?.kind) && typeof one.name === "string");

// The text, the choices and the view of the page's address; what is missing or of another type is as in `start`.
const linked = async (start) => {
  const code = new URLSearchParams(location.hash.slice(1)).get("code");
  if (code === null) return {};
  const found = await unpacked(code).catch(() => null);
  if (typeof found?.text !== "string") return { broken: true };
  const chosen = { ...start.chosen };
  for (const name of ["program", "mesh", "layout", "sbp"]) if (typeof found[name] === "string") chosen[name] = found[name];
  if (start.clusters.includes(found.cluster)) chosen.cluster = found.cluster;
  if (start.policies.includes(found.reduce)) chosen.reduce = found.reduce;
  for (const [name, size] of Object.entries(found.sizes ?? {})) if (Number.isSafeInteger(size) && size > 0) chosen.sizes[name] = size;
  const columns = areColumns(found.columns) ? found.columns.map(({ kind, name }) => ({ kind, name })) : null;
  const view = SHARED_VIEWS.includes(found.view) ? found.view : null;
  return { text: found.text, chosen, columns, view, linked: true };
};
