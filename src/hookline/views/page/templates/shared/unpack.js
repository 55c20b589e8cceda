// What Python packed: bytes as base64, and JSON as base64 of gzip.

function decodeBase64(text) {
  const raw = atob(text);
  const bytes = new Uint8Array(raw.length);
  for (let index = 0; index < raw.length; index += 1) bytes[index] = raw.charCodeAt(index);
  return bytes;
}

function unpackJson(text) {
  const packed = new Blob([decodeBase64(text)]).stream();
  const stream = packed.pipeThrough(new DecompressionStream("gzip"));
  return new Response(stream).json();
}
