awk 'NF == 7 && $6 ~ /^5[0-9][0-9]$/ {
  split($4, part, "?"); path = part[1]; count[path]++
  if (!(path in first)) first[path] = $2
  last[path] = $2
} END { for (path in count) printf "%s\t%d\t%s\t%s\n", path, count[path], first[path], last[path] }' \
  /work/access.log | LC_ALL=C sort -t "$(printf '\t')" -k2,2nr -k1,1 > /work/errors.tsv
