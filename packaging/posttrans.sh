#!/bin/sh
# At the end of rpm's transaction. Under running pods, runtimes that were in this package stay if
# nobody installed crust-runtimes, which takes them over whenever it comes.
set -e

for runtime in /usr/bin/crust-runc /usr/bin/crust-vm; do
	[ -e $runtime.kept ] || continue
	if [ -e $runtime ]; then
		rm $runtime.kept
	else
		mv $runtime.kept $runtime
		echo "crust-proxy: pods run by $runtime: it stays, but is in the package crust-runtimes now. Install that." >&2
	fi
done
