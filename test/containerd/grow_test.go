//go:build system

package containerd

import (
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"github.com/crust-proxy/crust-proxy/test/check"
	"github.com/crust-proxy/crust-proxy/test/rig"
	"github.com/crust-proxy/crust-proxy/test/rig/cri"
)

const grownSize = 2 * diskSize

// writer is a container's script that writes files, each named by its checksum,
// until it is told to end.
const writer = `i=0
while [ ! -e /tmp/stop ]; do
	dd if=/dev/urandom of=/data/new bs=64k count=4 2>/dev/null || { echo failed > /tmp/bad; break; }
	sum=$(sha256sum < /data/new | cut -d' ' -f1)
	mv /data/new /data/$sum.sum && i=$((i + 1)) && echo $i > /tmp/count && sleep 0.01
	[ $i -lt 400 ] || break
done
touch /tmp/ended`

// wantWhole checks the files of a writer, wherever the volume is now.
const wantWhole = `cd /data && for f in *.sum; do
	[ "$(sha256sum < $f | cut -d' ' -f1).sum" = $f ] || { echo "$f is not whole"; exit 1; }
done`

func TestGrowWhileAWriterRuns(t *testing.T) {
	r := newTestNode(t)
	for _, fs := range filesystems {
		t.Run(fs, func(t *testing.T) { r.of(t).growOnline(fs) })
	}
	r.wantClean()
}

func (r *testNode) growOnline(fs string) {
	t := r.t
	v := r.staged("pod-"+fs, fs)
	pod := r.pod(v.pod)
	id := r.run(pod, "main", at(v.target))
	small := r.df(id)
	r.exec(id, "("+writer+") >/dev/null 2>&1 </dev/null &")
	r.wantProgress(id)
	v.grow(grownSize)
	got, err := v.expand(grownSize)
	if rig.MayGrow(t, fs) {
		check.Must(t, err)
		if got != grownSize {
			t.Errorf("it has grown to %d", got)
		}
		if large := r.df(id); large.bytesTotal < small.bytesTotal+(grownSize-diskSize)*9/10 {
			t.Errorf("the filesystem went from %d to %d", small.bytesTotal, large.bytesTotal)
		}
	} else if status.Code(err) == codes.OK || !strings.Contains(err.Error(), "operation not permitted") {
		t.Errorf("without the right to grow: %v", err)
	}
	r.wantProgress(id)
	r.exec(id, "touch /tmp/stop; while [ ! -e /tmp/ended ]; do sleep 0.05; done; [ ! -e /tmp/bad ]; sync")
	r.exec(id, wantWhole)
	v.wantStats(id)
	v.wantUnseen()
	r.remove(pod)
	v.unstage()
	v.check()
}

// wantProgress waits until the writer has written more.
func (r *testNode) wantProgress(container string) {
	r.t.Helper()
	r.exec(container, `was=$(cat /tmp/count 2>/dev/null || echo 0)
for i in $(seq 200); do
	now=$(cat /tmp/count 2>/dev/null || echo 0)
	[ "$now" -gt $((was + 1)) ] 2>/dev/null && exit 0
	[ -e /tmp/bad ] && exit 1
	[ -e /tmp/ended ] && exit 0
	sleep 0.05
done
exit 1`)
}

// A volume that was grown, restored or cloned while no sandbox ran is as large as
// its device when one mounts it.
func TestGrownWhileNoSandboxRan(t *testing.T) {
	r := newTestNode(t)
	for _, fs := range filesystems {
		t.Run(fs+" restored", func(t *testing.T) {
			r := r.of(t)
			v := r.volume("pod-restored-"+fs, fs, diskSize)
			v.grow(grownSize)
			v.stage()
			r.wantLargeAtMount(v)
		})
		t.Run(fs+" grown", func(t *testing.T) {
			r := r.of(t)
			v := r.staged("pod-grown-"+fs, fs)
			v.grow(grownSize)
			got, err := v.expand(grownSize)
			if err != nil || got != grownSize {
				t.Errorf("expand without a sandbox: %d, %v", got, err)
			}
			r.wantLargeAtMount(v)
		})
	}
	r.wantClean()
}

// A volume that grows after crust-runc has mounted it, and before that has left word of
// the sandbox, is grown when the sandbox answers: kubelet was told that it is.
func TestGrownWhileItIsMounted(t *testing.T) {
	program := crustRunc(t)
	wrapper := t.TempDir() + "/crust-runc"
	script := fmt.Sprintf("#!/bin/sh\nCRUST_FAILPOINTS=crust-runc-attached=sleep:3s exec %s \"$@\"\n", program)
	check.Must(t, os.WriteFile(wrapper, []byte(script), 0o755)) //nolint:gosec // a program
	r := &testNode{t: t, program: program, node: newNode(t, map[string]string{"crust": wrapper})}
	t.Cleanup(r.killAgents)
	r.d = rig.NewDaemon(t)
	r.d.Containerd = r.node.Socket
	r.d.Handlers = "default: crust\ncrust: {enabled: true, programs: [" + program + "]}"
	r.d.Start()
	v := r.staged("pod-1", "xfs") // a mounted ext4 grows only with CAP_SYS_RESOURCE
	pod, id := r.pod(v.pod), ""
	started := make(chan error, 1)
	go func() {
		var err error
		id, err = pod.Run(r.ctx(), cri.Container{Name: "main", Mounts: []cri.Mount{at(v.target)}})
		started <- err
	}()
	check.Eventually(t, "it is mounted in the sandbox", func() bool {
		tables, _ := filepath.Glob("/proc/[0-9]*/mountinfo")
		return slices.ContainsFunc(tables, func(table string) bool {
			raw, _ := os.ReadFile(table) //nolint:gosec // of a process, which may be gone
			return strings.Contains(string(raw), " "+v.disk+" ")
		})
	})
	v.grow(grownSize)
	if size, err := v.expand(grownSize); err != nil || size != grownSize {
		t.Errorf("%d, %v", size, err)
	}
	check.Must(t, <-started)
	check.Eventually(t, "it has grown", func() bool {
		_, err := v.stats()
		return err == nil && r.df(id).bytesTotal >= grownSize*8/10
	})
	r.remove(pod)
	v.unstage()
	v.check()
	r.wantClean()
}

func (r *testNode) wantLargeAtMount(v *volume) {
	r.t.Helper()
	pod := r.pod(v.pod)
	id := r.run(pod, "main", at(v.target))
	if has := r.df(id); has.bytesTotal < grownSize*8/10 {
		r.t.Errorf("%s: it has %d of %d bytes", v.fs, has.bytesTotal, int64(grownSize))
	}
	v.wantStats(id)
	r.remove(pod)
	v.unstage()
	v.check()
}

// Expanding beyond the device is refused, with the reason.
func TestExpandBeyondTheDevice(t *testing.T) {
	r := newTestNode(t)
	v := r.staged("pod-1", "xfs")
	pod := r.pod("pod-1")
	id := r.run(pod, "main", at(v.target))
	_, err := v.expand(grownSize)
	if status.Code(err) != codes.OutOfRange || !strings.Contains(err.Error(), "the device has to grow first") {
		t.Errorf("it ended with: %v", err)
	}
	v.wantStats(id)
	r.remove(pod)
	v.unstage()
}
