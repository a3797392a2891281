//go:build system

package kube_test

import (
	"context"
	"errors"
	"fmt"
	"os"
	"slices"
	"strconv"
	"strings"

	apierrors "k8s.io/apimachinery/pkg/api/errors"

	"github.com/crust-proxy/crust-proxy/test/check"
	"github.com/crust-proxy/crust-proxy/test/kube/cluster"
)

// ledger is a volume, and how many lines its writers were promised to be on it.
type ledger struct {
	*cluster.Volume
	k        *cluster.Kube
	promised int
}

// writer is a pod that writes numbers, one a line, to its volume. A line counts once it was synced: then its number is
// in /promised, in the container's own files. The container side only has the volume, and is there to be killed.
type writer struct {
	*cluster.Pod
	on *ledger
	identity
	// side is the first process of the other container.
	side int
	// restarts are how often the two containers were restarted.
	restarts map[string]int32
}

// identity is what stays the same while a container runs.
type identity struct {
	pid                         int
	process, container, sandbox string
}

// gapless is a script that fails where a number is missing from a ledger; it gives the last one. A line is a number and
// the process that wrote it. Each process counts on from the last number that it found: a containerd that is stopped
// while it starts a container can let it run beside the container's next attempt for a while, and both count.
const gapless = `awk '($2 in last) ? $1 != last[$2] + 1 : $1 > max + 1 {print "line " NR " is " $0; bad = 1; exit}
{last[$2] = $1; if ($1 > max) max = $1} END {if (bad) exit 1; print max + 0}' /data/ledger`

// write begins where an earlier writer has stopped. It goes on until it is asked to end, or an error.
const write = `trap 'exit 0' TERM
touch /data/ledger
me=$(cat /proc/sys/kernel/random/uuid)
n=$(` + gapless + `) || { echo "$n" >/failed; exit 1; }
while :; do
	n=$((n+1))
	echo $n $me >>/data/ledger && sync /data/ledger || { echo "line $n was not written" >/failed; exit 1; }
	echo $n >/promised
	sleep 0.2
done`

// newWriter makes a pod that writes, and waits for nothing.
func newWriter(k *cluster.Kube, name, class string, on *ledger) *writer {
	k.T.Helper()
	p := k.NewPod(name, class).With(on.Volume, "/data").Script(write)
	side := cluster.Sleeper("side")
	side.VolumeMounts = p.Spec.Containers[0].VolumeMounts
	p.Spec.Containers = append(p.Spec.Containers, side)
	return &writer{Pod: p.Create(), on: on}
}

// settle waits until the writer writes, and remembers what must not change.
func (w *writer) settle(k *cluster.Kube) {
	k.T.Helper()
	before := w.on.promised
	k.Eventually("pod "+w.Name+" writes", func(ctx context.Context) error {
		if err := isReady(ctx, w.Pod); err != nil {
			return err
		}
		if err := w.look(ctx); err != nil {
			return err
		}
		return w.wrote(before)
	})
}

// look reads which process, container and sandbox it has.
func (w *writer) look(ctx context.Context) error {
	is, err := w.Get(ctx)
	if err != nil {
		return err
	}
	w.restarts = make(map[string]int32)
	for _, one := range is.Status.ContainerStatuses {
		w.restarts[one.Name] = one.RestartCount
		if one.Name == "main" {
			w.container = one.ContainerID
		}
	}
	if w.pid, err = w.Pid("main"); err != nil {
		return err
	}
	if w.process, err = born(w.pid); err != nil {
		return err
	}
	if w.side, err = w.Pid("side"); err != nil {
		return err
	}
	w.sandbox, err = w.Sandbox()
	return err
}

// wrote tells whether there is a promise beyond some line, and notes it down.
func (w *writer) wrote(beyond int) error {
	line, err := w.promise()
	if err != nil {
		return err
	}
	if line <= beyond {
		return fmt.Errorf("pod %s has promised no line after %d", w.Name, beyond)
	}
	w.on.promised = max(w.on.promised, line)
	return nil
}

// promise is the last line that was synced. It needs nobody but the kernel.
func (w *writer) promise() (int, error) {
	if now, err := born(w.pid); err != nil || now != w.process {
		return 0, fmt.Errorf("pod %s: the process that wrote has gone: %w", w.Name, errors.Join(err))
	}
	root := fmt.Sprintf("/proc/%d/root", w.pid)
	if said, err := os.ReadFile(root + "/failed"); err == nil {
		return 0, fmt.Errorf("pod %s: %s", w.Name, said)
	}
	raw, err := os.ReadFile(root + "/promised")
	if err != nil {
		return 0, err
	}
	// It is empty for a moment while it is written.
	return strconv.Atoi(strings.TrimSpace(string(raw)))
}

// goesOn waits until the very process that wrote has written once more.
func (w *writer) goesOn(k *cluster.Kube) {
	k.T.Helper()
	_, err := born(w.pid)
	check.Require(k.T, err == nil, "pod %s: its process has gone: %v", w.Name, err)
	before := w.on.promised
	k.Eventually("pod "+w.Name+" goes on writing", func(context.Context) error { return w.wrote(before) })
}

// unchanged wants everything of the pod to be what it was, and every promise kept. The container side may have been
// killed: then it was started anew, once or more, for what takes containerd away may spoil an attempt.
func (w *writer) unchanged(k *cluster.Kube, killed bool) {
	k.T.Helper()
	w.goesOn(k)
	was, restarts := w.identity, w.restarts
	k.Eventually("pod "+w.Name+" is whole again, and only what was killed was restarted", func(ctx context.Context) error {
		if err := w.look(ctx); err != nil {
			return err
		}
		if w.restarts["main"] != restarts["main"] || (w.restarts["side"] > restarts["side"]) != killed {
			return fmt.Errorf("restarts were %v and are %v", restarts, w.restarts)
		}
		return isReady(ctx, w.Pod)
	})
	check.That(k.T, was == w.identity, "pod %s had %+v and has now %+v", w.Name, was, w.identity)
	w.keeps(k)
}

// keeps wants every promise kept, as the pod's own container sees it.
func (w *writer) keeps(k *cluster.Kube) {
	k.T.Helper()
	for _, container := range []string{"main", "side"} {
		out, err := w.TryExec(container, gapless)
		if err != nil {
			k.T.Errorf("pod %s, container %s: %s: %v", w.Name, container, out, err)
			continue
		}
		lines, err := strconv.Atoi(strings.TrimSpace(out))
		check.That(k.T, err == nil && lines >= w.on.promised,
			"pod %s, container %s: LOST: %q lines, and %d were promised", w.Name, container, out, w.on.promised)
	}
}

// isReady tells whether all containers of a pod run.
func isReady(ctx context.Context, p *cluster.Pod) error {
	is, err := p.Get(ctx)
	if err != nil {
		return err
	}
	for _, condition := range is.Status.Conditions {
		if condition.Type == "Ready" && condition.Status == "True" {
			return nil
		}
	}
	return fmt.Errorf("it is %s: %s", is.Status.Phase, strings.Join(p.Events(), "; "))
}

// hasGone tells whether the pod has gone, and its volume was given back.
func (w *writer) hasGone(ctx context.Context) error { return w.hasGoneBut(ctx) }

// hasGoneBut tells whether the pod has gone, and nothing is left but some things.
func (w *writer) hasGoneBut(ctx context.Context, some ...string) error {
	switch _, err := w.Get(ctx); {
	case err == nil:
		return errors.New("it is there")
	case !apierrors.IsNotFound(err):
		return err
	}
	if slices.ContainsFunc(w.left(), func(what string) bool { return !slices.Contains(some, what) }) {
		return errors.New(w.found())
	}
	return nil
}

// born is when a process began, which tells it from a later one of the same number.
func born(pid int) (string, error) {
	raw, err := os.ReadFile(fmt.Sprintf("/proc/%d/stat", pid))
	if err != nil {
		return "", err
	}
	_, after, _ := strings.Cut(string(raw), ") ")
	fields := strings.Fields(after)
	if len(fields) < 20 || fields[0] == "Z" {
		return "", fmt.Errorf("process %d has ended", pid)
	}
	return fields[19], nil
}
