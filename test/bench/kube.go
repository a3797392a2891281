package main

import (
	"context"
	"encoding/json"
	"fmt"
	"os"
	"os/exec"
	"os/signal"
	"path/filepath"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"syscall"
	"time"

	"github.com/crust-proxy/crust-proxy/test/check"
	"github.com/crust-proxy/crust-proxy/test/kube/cluster"
	"github.com/crust-proxy/crust-proxy/test/rig"
)

var nodePrograms = []string{"crust-proxy", "crust-driver", "crust-runc", "crust-runc-agent"}

const (
	crowdSize   = 60
	crowdRounds = 3
	// crowdTime is far more than the pods take.
	crowdTime = 5 * time.Minute
)

// crowdKind is one way of having volumes in pods.
type crowdKind struct{ name, driver, class string }

// crowded is the first kind, beside many open descriptors.
const crowded = "crowded"

// The first is measured against each of the others.
var crowdKinds = []crowdKind{
	{"deferred", cluster.Block, cluster.Crust},
	{crowded, cluster.Block, cluster.Crust},
	{"mounted", cluster.Block, "runc"},
	{"direct", cluster.Plain, "runc"},
}

// lap is how long the pods of one kind took once.
type lap struct{ Start, End time.Duration }

func (l lap) whole() time.Duration { return l.Start + l.End }

// laps are those of one kind, in the order of the rounds.
type laps []lap

func (l laps) median(of func(lap) time.Duration) time.Duration {
	var all durations
	for _, one := range l {
		all = append(all, of(one))
	}
	return median(all)
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

// order is what the process in a node's namespaces is told.
type order struct {
	Programs     string
	Pods, Rounds int
}

// onNode is what was measured on a node.
type onNode struct {
	Laps map[string]laps
	// Calls is how often kubelet has asked crust-proxy to stage, publish, unpublish
	// and unstage, and Refused how often it has to ask again.
	Calls, Refused int
}

// kubePods measures, with a real kubelet, pods that come and go together.
func kubePods(r *testbed) {
	r.must(cluster.Build())
	r.build(nodePrograms...)
	o := order{Programs: r.daemon.Programs, Pods: crowdSize, Rounds: crowdRounds}
	if r.set.quick {
		o.Pods, o.Rounds = 15, 2
	}
	is := measureOnNode(r, o)
	deferred, mounted, direct := is.Laps["deferred"], is.Laps["mounted"], is.Laps["direct"]
	r.sheet.tell(fmt.Sprintf("%d pods with a volume each, created and deleted together: with runc, mounted on the host by the driver", o.Pods), mounted.text())
	r.sheet.atMost("the same with crust-runc, volumes of the same driver deferred", "<= 1.05x", deferred.against(mounted), 1.05,
		fmt.Sprintf("%.2fx (%s)", deferred.against(mounted), deferred.text()))
	r.sheet.tell("rounds of it, one by one", deferred.spread(mounted))
	beside := is.Laps[crowded].against(deferred)
	r.sheet.atMost("the same beside 50,000 more open descriptors, against without", "<= 1.05x", beside, 1.05,
		fmt.Sprintf("%.2fx (%s)", beside, is.Laps[crowded].text()))
	r.sheet.tell("the same, against that driver without crust-proxy", fmt.Sprintf("%.2fx (%s)", deferred.against(direct), direct.text()))
	r.sheet.tell("calls that changed volumes in it, and were refused so that kubelet had to repeat them", fmt.Sprintf("%d of %d", is.Refused, is.Calls))
}

// measureOnNode has another process measure in namespaces of its own, as a node has them.
func measureOnNode(r *testbed, o order) (is onNode) {
	told := check.Value(json.Marshal(o))(r.t)
	out := r.daemon.Dir + "/laps.json"
	p := r.again(roleNode, string(told), out)
	cmd := exec.CommandContext(r.ctx, p.Program, p.Args...) //nolint:gosec // ourselves
	cmd.Stdout, cmd.Stderr = os.Stderr, os.Stderr
	cmd.SysProcAttr = &syscall.SysProcAttr{Unshareflags: syscall.CLONE_NEWNS | syscall.CLONE_NEWNET, Pdeathsig: syscall.SIGKILL}
	// So it can tidy up.
	cmd.Cancel, cmd.WaitDelay = func() error { return cmd.Process.Signal(syscall.SIGTERM) }, time.Minute
	r.must(cmd.Run())
	r.must(json.Unmarshal(check.Value(os.ReadFile(out))(r.t), &is))
	return is
}

// serveNode is the role of a process that has a node, and measures on it. It writes the laps of each kind.
func serveNode(rawOrder, out string) error {
	var o order
	if err := json.Unmarshal([]byte(rawOrder), &o); err != nil {
		return err
	}
	ours := make(map[string]string)
	for _, name := range nodePrograms {
		ours[name] = filepath.Join(o.Programs, name)
	}
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	defer stop()
	return rig.Do(ctx, func(t rig.T) {
		k := cluster.OnNode(t, ours, "info")
		t.Cleanup(func() {
			if t.Failed() && ctx.Err() == nil {
				t.Log(k.Logs())
			}
		})
		check.Must(t, os.WriteFile(out, check.Value(json.Marshal(o.run(k)))(t), 0o600))
	})
}

// run has the crowds take turns. The first use of volumes is not counted, for they get their filesystems then.
func (o order) run(k *cluster.Kube) *onNode {
	crowds := o.crowds(k)
	is := &onNode{Laps: make(map[string]laps)}
	turns := slices.Clone(crowdKinds)
	used := make(map[string]bool)
	for round := range o.Rounds + 1 {
		for _, kind := range turns {
			if round == 0 && used[kind.driver] {
				continue
			}
			used[kind.driver] = true
			one := o.lap(k, kind, crowds[kind.name])
			k.T.Logf("round %d: %s: %.1f s to start, %.1f s to remove", round, kind.name, one.Start.Seconds(), one.End.Seconds())
			if round > 0 {
				is.Laps[kind.name] = append(is.Laps[kind.name], one)
			}
		}
		slices.Reverse(turns)
	}
	k.Must(is.count())
	return is
}

// crowds makes the pods of each kind. Kinds with the same driver have the same volumes.
func (o order) crowds(k *cluster.Kube) map[string]*cluster.Crowd {
	volumes := make(map[string][]*cluster.Volume)
	crowds := make(map[string]*cluster.Crowd)
	for _, kind := range crowdKinds {
		if volumes[kind.driver] == nil {
			var wanted []cluster.VolumeOptions
			short, _, _ := strings.Cut(kind.driver, ".")
			for n := range o.Pods {
				wanted = append(wanted, cluster.VolumeOptions{Name: fmt.Sprintf("%s-%d", short, n), Driver: kind.driver})
			}
			volumes[kind.driver] = k.NewVolumes(wanted...)
		}
		crowds[kind.name] = k.NewCrowd(kind.name, kind.class, volumes[kind.driver])
	}
	return crowds
}

var ofVolumes = regexp.MustCompile(`\ncrust_proxy_calls_total(\{.*method="Node(?:Stage|Publish|Unpublish|Unstage)Volume".*\}) (\d+)`)

// count reads from crust-proxy's metrics how many calls there were.
func (is *onNode) count() error {
	metrics, err := cluster.ProxyHTTP("/metrics")
	if err != nil {
		return err
	}
	for _, found := range ofVolumes.FindAllStringSubmatch(metrics, -1) {
		count, err := strconv.Atoi(found[2])
		if err != nil {
			return err
		}
		is.Calls += count
		if !strings.Contains(found[1], `code="OK"`) {
			is.Refused += count
		}
	}
	return nil
}

func (o order) lap(k *cluster.Kube, kind crowdKind, crowd *cluster.Crowd) (one lap) {
	ctx, cancel := context.WithTimeout(k.T.Context(), crowdTime)
	defer cancel()
	if kind.name == crowded {
		for _, holder := range openFiles(k.T) {
			defer holder.Kill()
		}
	}
	began := time.Now()
	k.Must(crowd.Start(ctx))
	one.Start = time.Since(began)
	records, err := filepath.Glob(cluster.ProxyRunDir + "/state/volumes/*.json")
	k.Must(err)
	deferred := kind.class == cluster.Crust
	check.Require(k.T, deferred == (len(records) == o.Pods) && (deferred || len(records) == 0),
		"%s: %d of %d volumes are deferred", kind.name, len(records), o.Pods)
	began = time.Now()
	k.Must(crowd.End(ctx))
	one.End = time.Since(began)
	return one
}
