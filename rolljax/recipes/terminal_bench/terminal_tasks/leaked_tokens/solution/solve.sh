cd /work/project
find . -type f | sed 's,^\./,,' | LC_ALL=C sort | while IFS= read -r file; do
  grep -no 'tok_[0-9a-f]\{20\}' "$file" | while IFS=: read -r line token; do
    body=${token:4:16}
    if [ "$(printf %s "$body" | sha256sum | cut -c1-4)" = "${token:20:4}" ]; then
      printf '%s:%s:%s\n' "$file" "$line" "$token"
    fi
  done
done > /work/leaks.txt
