// The files of the package in the file system of Python: an index in JSON, its length before it, and the contents.

export const unzipped = async (stream) =>
  new Uint8Array(await new Response(stream.pipeThrough(new DecompressionStream("gzip"))).arrayBuffer());

export const write = (FS, packed, folder) => {
  const length = new DataView(packed.buffer, packed.byteOffset).getUint32(0, true);
  const index = JSON.parse(new TextDecoder().decode(packed.subarray(4, 4 + length)));
  let at = 4 + length;
  const made = new Set();
  for (const [path, size] of index) {
    const whole = `${folder}/${path}`;
    const above = whole.slice(0, whole.lastIndexOf("/"));
    if (!made.has(above)) FS.mkdirTree(above);
    made.add(above);
    FS.writeFile(whole, packed.subarray(at, at + size), { canOwn: true });
    at += size;
  }
};
