# Strings, arrays, hashes and sorting, from a fixed seed.
random = Random.new(7)
result = 0
words = Hash.new { |hash, word| hash[word] = [] }
150_000.times { |i| words["word number #{random.rand(20_000)} of many"] << i }
words.each { |word, places| result += word.size * places.size }
records = Array.new(60_000) { |i| { id: i, name: "a name that is long enough for memory of its own #{i}", tags: Array.new(i % 8) { |j| j.to_s * 5 } } }
result += records.group_by { |record| record[:tags].size }.sum { |size, group| size * group.size }
text = records.map { |record| record[:name] + record[:tags].join("/") }.join("\n")
result += text.split("\n").map(&:reverse).sort.uniq.sum(&:size)
buffer = +""
40_000.times { |i| buffer << "line #{i} " << "x" * (i % 40) }
result += buffer.scan(/line \d+/).size
result += (1..200).sum { |i| Array.new(i * 50) { |j| "#{i}-#{j}" }.size }
puts result
