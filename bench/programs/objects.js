// Objects, typed arrays, buffers, JSON and compression, from a fixed seed.
const zlib = require('zlib');
let seed = 42;
const draw = (most) => (seed = (Math.imul(seed, 1103515245) + 12345) >>> 0, (seed >>> 8) % most);
let result = 0;
const records = [];
for (let i = 0; i < 80000; i++) records.push({ id: i, name: `name ${draw(50000)}`, tags: Array.from({ length: i % 6 }, () => draw(100)) });
const text = JSON.stringify(records);
result += text.length + JSON.parse(text).reduce((sum, record) => sum + record.tags.length, 0);
const map = new Map();
for (let i = 0; i < 200000; i++) map.set(`key ${draw(30000)}`, i);
result += map.size;
const kept = [];
for (let i = 0; i < 20000; i++) {
  const buffer = Buffer.alloc(64 + draw(8000), i & 255);
  if (i % 20 === 0) kept.push(buffer);
  result += buffer[buffer.length - 1];
}
for (let i = 0; i < 6; i++) {
  const packed = zlib.deflateSync(text.slice(i * 100000, i * 100000 + 1000000), { level: 6 });
  result += zlib.inflateSync(packed).length;
}
result += Buffer.concat(kept).length;
console.log(result);
