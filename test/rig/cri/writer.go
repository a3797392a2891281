package cri

// Writer is a script that has a container write files, each named by its checksum, until there is a file "end".
const Writer = `(i=0; while ! rm /tmp/end; do
	dd if=/dev/urandom of=/data/new bs=64k count=2 || exit 1
	mv /data/new /data/$(sha256sum </data/new | cut -d' ' -f1).sum && i=$((i + 1)) && echo $i >/tmp/count
	[ $((i % 50)) != 0 ] || rm -f /data/*.sum
done) >/dev/null 2>&1 </dev/null &
` + Progress

// Progress waits until the writer has written more. The file is empty for a moment, each time.
const Progress = `was=
for i in $(seq 1200); do
	now=$(cat /tmp/count 2>/dev/null)
	was=${was:-$now}
	[ -n "$now" ] && [ "$now" -gt "$was" ] && exit 0
	sleep 0.1
done
exit 1`
