cat > /work/rotate.sh <<'END'
#!/bin/bash
dir=$1
keep=$2
if [ ! -d "$dir" ]; then
  echo "rotate.sh: $dir is no folder" >&2
  exit 2
fi
for log in "$dir"/*.log; do
  [ -s "$log" ] || continue
  numbers=$(for old in "$log".*; do echo "${old#"$log".}"; done | grep -x '[0-9][0-9]*' | sort -rn)
  for number in $numbers; do
    if [ "$number" -ge "$keep" ]; then
      rm -- "$log.$number"
    else
      mv -- "$log.$number" "$log.$((number + 1))"
    fi
  done
  mv -- "$log" "$log.1"
  : > "$log"
done
exit 0
END
