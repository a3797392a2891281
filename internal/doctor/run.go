package doctor

import (
	"context"
	"strings"
	"sync"

	adminv1 "github.com/crust-proxy/crust-proxy/proto/crust/admin/v1"
)

// Daemon is what the daemon said of itself. Err is set where it could not be
// asked; then the rest is empty, and the local checks still run.
type Daemon struct {
	Err error
	// Advice is what to do about Err.
	Advice   string
	Node     *adminv1.GetNodeResponse
	Handlers []*adminv1.Handler
	Volumes  []*adminv1.Volume
}

func (d Daemon) up() bool { return d.Err == nil }

// kataHandler is the name of Kata's handler; "" where the daemon has none, or is down.
func (d Daemon) kataHandler() string {
	for _, h := range d.Handlers {
		if strings.HasPrefix(h.GetName(), "kata") {
			return h.GetName()
		}
	}
	return ""
}

type check struct {
	name string
	run  func(context.Context, Node, Daemon) []Finding
}

var checks = []check{
	{"daemon", checkDaemon},
	{"daemon-findings", checkDaemonFindings},
	{"handlers", checkHandlers},
	{"volumes", checkVolumes},
	{"sockets", checkSockets},
	{"abstract-sockets", checkAbstract},
	{"run-dir", checkRunDir},
	{"kernel", checkKernel},
	{"kata-config", checkKataConfig},
	{"kata-directory", checkKataDir},
	{"kata-volumes", checkKataVolumes},
	{"kubelet", checkKubelet},
	{"registrations", checkRegistrations},
	{"mount-namespaces", checkNamespaces},
	{"guards", checkGuards},
	{"containerd", checkContainerd},
	{"cri", checkCRI},
	{"cri-o", checkCRIO},
	{"cluster", checkCluster},
	{"limits", checkLimits},
	{"loop-devices", checkLoop},
}

// Names lists the checks in the order in which they run.
func Names() []string {
	var names []string
	for _, c := range checks {
		names = append(names, c.name)
	}
	return names
}

// Run runs every check, all at once: on a node with thousands of volumes some of them
// read as many files.
func Run(ctx context.Context, node Node, daemon Daemon) Report {
	report := Report{Findings: []Finding{}}
	node.table = sync.OnceValues(node.readMounts)
	found := make([][]Finding, len(checks))
	var running sync.WaitGroup
	for i, c := range checks {
		running.Go(func() { found[i] = c.run(ctx, node, daemon) })
	}
	running.Wait()
	for i, c := range checks {
		for _, f := range found[i] {
			f.Check = c.name
			report.Findings = append(report.Findings, f)
		}
	}
	return report
}
