"""Objects, strings, dictionaries, lists, JSON and large buffers, from a fixed seed."""
import json
import random

random.seed(7)


class Node:
    def __init__(self, key, left, right):
        self.key, self.left, self.right = key, left, right


def tree(depth, key):
    if depth == 0:
        return Node(key, None, None)
    return Node(key, tree(depth - 1, 2 * key), tree(depth - 1, 2 * key + 1))


def total(node):
    return 0 if node is None else node.key % 7 + total(node.left) + total(node.right)


result = 0
for _ in range(4):
    result += total(tree(14, 1))
words = {}
for i in range(150_000):
    words.setdefault(f"word{random.randrange(20_000)}", []).append(i)
result += sum(len(places) * len(word) for word, places in words.items())
records = [{"id": i, "name": f"name {i}", "tags": [str(j) for j in range(i % 6)]} for i in range(20_000)]
text = json.dumps(records)
result += len(text) + sum(len(record["tags"]) for record in json.loads(text))
parts = []
for i in range(1, 300):
    parts.append(bytearray(i * 1000))
    if len(parts) > 20:
        parts.pop(random.randrange(len(parts)))
result += sum(map(len, parts))
lines = sorted((text[i : i + 40] for i in range(0, len(text), 20)), reverse=True)
result += len("".join(lines)) + len(set(lines))
print(result)
