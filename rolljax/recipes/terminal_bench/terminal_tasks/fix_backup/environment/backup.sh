#!/bin/bash
# backup.sh FROM TO: copies every .txt file under FROM into the folder TO, and prints how many.
from=$1
to=$2
mkdir $to
count=0
for file in $(find $from -name *.txt); do
  name=$(echo $file | sed "s,$from/,," | tr / _)
  cp $file $to/$name
  count=$((count + 1))
done
echo $count
