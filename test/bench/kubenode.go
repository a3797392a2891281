//go:build system

package main

import (
	"context"
	"encoding/json"
	"fmt"
	"os"
	"os/signal"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"syscall"
	"time"

	"github.com/crust-proxy/crust-proxy/test/kube/cluster"
)

// crowdKind is one way of having volumes in pods.
type crowdKind struct{ name, driver, class string }

// The first is measured against each of the others.
var crowdKinds = []crowdKind{
	{"deferred", cluster.Block, cluster.Crust},
	{"mounted", cluster.Block, "runc"},
	{"direct", cluster.Plain, "runc"},
}

// lap is how long the pods of one kind took once.
type lap struct{ Start, End time.Duration }

func (l lap) whole() time.Duration { return l.Start + l.End }

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

// crowdTime is far more than the pods take.
const crowdTime = 5 * time.Minute

// serveNode is the role of a process that has a node, and measures on it. It writes
// the laps of each kind.
func serveNode(rawOrder, out string) error {
	var o order
	if err := json.Unmarshal([]byte(rawOrder), &o); err != nil {
		return err
	}
	ours := make(map[string]string)
	for _, name := range nodePrograms {
		ours[name] = filepath.Join(o.Programs, name)
	}
	return cluster.RunWith(ours, "info", func(c *cluster.Cluster) error {
		ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
		defer stop()
		is, err := o.run(ctx, c)
		if ctx.Err() != nil {
			return ctx.Err()
		}
		if err != nil {
			return fmt.Errorf("%w\n%s", err, c.Logs())
		}
		raw, err := json.Marshal(is)
		if err != nil {
			return err
		}
		return os.WriteFile(out, raw, 0o600)
	})
}

// run has the crowds take turns. The first use of volumes is not counted, for they
// get their filesystems then.
func (o order) run(ctx context.Context, c *cluster.Cluster) (*onNode, error) {
	crowds, err := o.crowds(c)
	if err != nil {
		return nil, err
	}
	is := &onNode{Laps: make(map[string]laps)}
	turns := slices.Clone(crowdKinds)
	used := make(map[string]bool)
	for round := range o.Rounds + 1 {
		for _, kind := range turns {
			if round == 0 && used[kind.driver] {
				continue
			}
			used[kind.driver] = true
			one, err := o.lap(ctx, kind, crowds[kind.name])
			if err != nil {
				return nil, fmt.Errorf("%s: %w", kind.name, err)
			}
			fmt.Fprintf(os.Stderr, "round %d: %s: %.1f s to start, %.1f s to remove\n", round, kind.name, one.Start.Seconds(), one.End.Seconds())
			if round > 0 {
				is.Laps[kind.name] = append(is.Laps[kind.name], one)
			}
		}
		slices.Reverse(turns)
	}
	return is, is.count()
}

// crowds makes the pods of each kind. Kinds with the same driver have the same
// volumes.
func (o order) crowds(c *cluster.Cluster) (map[string]*cluster.Crowd, error) {
	k := &cluster.Kube{Cluster: c}
	volumes := make(map[string][]*cluster.Volume)
	crowds := make(map[string]*cluster.Crowd)
	for _, kind := range crowdKinds {
		if volumes[kind.driver] == nil {
			var wanted []cluster.VolumeOptions
			short, _, _ := strings.Cut(kind.driver, ".")
			for n := range o.Pods {
				wanted = append(wanted, cluster.VolumeOptions{Name: fmt.Sprintf("%s-%d", short, n), Driver: kind.driver})
			}
			made, err := c.MakeVolumes(wanted...)
			if err != nil {
				return nil, err
			}
			volumes[kind.driver] = made
		}
		crowds[kind.name] = k.NewCrowd(kind.name, kind.class, volumes[kind.driver])
	}
	return crowds, nil
}

// count reads from crust-proxy's metrics how many calls there were.
func (is *onNode) count() error {
	metrics, err := cluster.ProxyHTTP("/metrics")
	if err != nil {
		return err
	}
	for line := range strings.SplitSeq(metrics, "\n") {
		labels, ok := strings.CutPrefix(line, "crust_proxy_calls_total")
		if !ok || !ofVolumes.MatchString(labels) {
			continue
		}
		var count int
		if _, err := fmt.Sscan(labels[strings.LastIndexByte(labels, ' ')+1:], &count); err != nil {
			return fmt.Errorf("%s: %w", line, err)
		}
		is.Calls += count
		if !strings.Contains(labels, `code="OK"`) {
			is.Refused += count
		}
	}
	return nil
}

var ofVolumes = regexp.MustCompile(`method="Node(Stage|Publish|Unpublish|Unstage)Volume"`)

func (o order) lap(ctx context.Context, kind crowdKind, crowd *cluster.Crowd) (lap, error) {
	ctx, cancel := context.WithTimeout(ctx, crowdTime)
	defer cancel()
	began := time.Now()
	if err := crowd.Start(ctx); err != nil {
		return lap{}, err
	}
	one := lap{Start: time.Since(began)}
	records, err := filepath.Glob(cluster.ProxyRunDir + "/state/volumes/*.json")
	if err != nil {
		return lap{}, err
	}
	if deferred := kind.class == cluster.Crust; deferred != (len(records) == o.Pods) || (!deferred && len(records) > 0) {
		return lap{}, fmt.Errorf("%d of %d volumes are deferred", len(records), o.Pods)
	}
	began = time.Now()
	err = crowd.End(ctx)
	one.End = time.Since(began)
	return one, err
}
