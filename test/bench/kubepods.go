//go:build system

package main

import (
	"context"
	"encoding/json"
	"fmt"
	"os"
	"os/exec"
	"slices"
	"syscall"
	"time"

	"github.com/crust-proxy/crust-proxy/test/kube/cluster"
	"github.com/crust-proxy/crust-proxy/test/rig"
)

// nodePrograms are ours on a node.
var nodePrograms = []string{"crust-proxy", "crust-driver", "crust-runc", "crust-runc-agent"}

const (
	crowdSize   = 60
	crowdRounds = 3
)

// kubePods measures, with a real kubelet, pods that come and go together.
func kubePods(ctx context.Context, set settings, r *testbed, s *sheet) error {
	if err := cluster.Build(); err != nil {
		return err
	}
	if err := rig.BuildRelease(r.dir, nodePrograms...); err != nil {
		return err
	}
	o := order{Programs: r.dir, Pods: crowdSize, Rounds: crowdRounds}
	if set.quick {
		o.Pods, o.Rounds = 15, 2
	}
	is, err := r.onNode(ctx, o)
	if err != nil {
		return err
	}
	deferred, mounted, direct := is.Laps["deferred"], is.Laps["mounted"], is.Laps["direct"]
	s.tell(fmt.Sprintf("%d pods with a volume each, created and deleted together: with runc, mounted on the host by the driver", o.Pods), mounted.text())
	s.atMost("the same with crust-runc, volumes of the same driver deferred", "<= 1.15x", deferred.against(mounted), 1.15,
		fmt.Sprintf("%.2fx (%s)", deferred.against(mounted), deferred.text()))
	s.tell("rounds of it, one by one", deferred.spread(mounted))
	s.tell("the same, against that driver without crust-proxy", fmt.Sprintf("%.2fx (%s)", deferred.against(direct), direct.text()))
	s.tell("calls that changed volumes in it, and were refused so that kubelet had to repeat them", fmt.Sprintf("%d of %d", is.Refused, is.Calls))
	return nil
}

// onNode has another process measure in namespaces of its own, as a node has them.
func (r *testbed) onNode(ctx context.Context, o order) (*onNode, error) {
	self, err := os.Executable()
	if err != nil {
		return nil, err
	}
	told, err := json.Marshal(o)
	if err != nil {
		return nil, err
	}
	out := r.dir + "/laps.json"
	cmd := exec.CommandContext(ctx, self, roleNode, string(told), out) //nolint:gosec // ourselves
	cmd.Stdout, cmd.Stderr = os.Stderr, os.Stderr
	cmd.SysProcAttr = &syscall.SysProcAttr{Unshareflags: syscall.CLONE_NEWNS | syscall.CLONE_NEWNET, Pdeathsig: syscall.SIGKILL}
	// So it can tidy up.
	cmd.Cancel, cmd.WaitDelay = func() error { return cmd.Process.Signal(syscall.SIGTERM) }, time.Minute
	if err := cmd.Run(); err != nil {
		return nil, fmt.Errorf("on the node: %w", err)
	}
	raw, err := os.ReadFile(out) //nolint:gosec // of our own directory
	if err != nil {
		return nil, err
	}
	is := &onNode{}
	return is, json.Unmarshal(raw, is)
}

// laps are those of one kind, in the order of the rounds.
type laps []lap

func (l laps) median(of func(lap) time.Duration) time.Duration {
	var all durations
	for _, one := range l {
		all = append(all, of(one))
	}
	return all.median()
}

func (l laps) against(other laps) float64 {
	return float64(l.median(lap.whole)) / float64(other.median(lap.whole))
}

// spread is the least and the most of what the rounds tell one by one.
func (l laps) spread(other laps) string {
	var ratios []float64
	for i := range l {
		ratios = append(ratios, float64(l[i].whole())/float64(other[i].whole()))
	}
	return fmt.Sprintf("%.2fx to %.2fx", slices.Min(ratios), slices.Max(ratios))
}

func (l laps) text() string {
	return fmt.Sprintf("%.1f s to start, %.1f s to remove", l.median(func(one lap) time.Duration { return one.Start }).Seconds(),
		l.median(func(one lap) time.Duration { return one.End }).Seconds())
}
