cat > /work/backup.sh <<'END'
#!/bin/bash
# backup.sh FROM TO: copies every .txt file under FROM into the folder TO, and prints how many.
from=$1
to=$2
mkdir -p -- "$to"
count=0
while IFS= read -r -d '' file; do
  name=${file#"$from"/}
  cp -- "$file" "$to/${name//\//_}"
  count=$((count + 1))
done < <(find "$from" -type f -name '*.txt' -print0)
echo "$count"
END
