cat > /work/report.sh <<'END'
#!/bin/bash
if [ ! -d "$1" ]; then
  echo "report.sh: $1 is no folder" >&2
  exit 2
fi
find "$1" -mindepth 1 -maxdepth 1 -type d -print0 | while IFS= read -r -d '' folder; do
  bytes=$(find "$folder" -type f -printf '%s\n' | awk '{ sum += $1 } END { printf "%d", sum }')
  [ "$bytes" -gt "$2" ] || continue
  newest=$(find "$folder" -type f -printf '%T@ %P\n' | sort -n | tail -n 1 | cut -d ' ' -f 2-)
  printf '%s\t%s\t%s\n' "$(basename "$folder")" "$bytes" "$newest"
done | LC_ALL=C sort -t "$(printf '\t')" -k 2,2nr -k 1,1
END
