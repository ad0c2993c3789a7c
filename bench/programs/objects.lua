-- Trees, tables that grow, and strings.
local function tree(depth)
  if depth == 0 then return {} end
  return {tree(depth - 1), tree(depth - 1)}
end
local function count(node)
  return node[1] and 1 + count(node[1]) + count(node[2]) or 1
end
local result = 0
local kept = tree(16)
for round = 1, 12 do
  result = result + count(tree(14))
end
local seed = 42
local function draw(most)
  seed = (seed * 1103515245 + 12345) % 2147483648
  return seed // 65536 % most
end
local words = {}
for i = 1, 300000 do
  local word = "word " .. draw(30000)
  words[word] = (words[word] or 0) + 1
end
for word, times in pairs(words) do result = result + #word * times end
local parts = {}
for i = 1, 100000 do parts[i] = string.format("%d:%s", i, string.rep("x", draw(50))) end
local text = table.concat(parts, ",")
for piece in text:gmatch("[^,]+") do result = result + #piece end
print(result + count(kept))
