package doctor

import (
	"context"

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

// up tells whether the daemon answered.
func (d Daemon) up() bool { return d.Err == nil }

type check struct {
	name string
	run  func(context.Context, Node, Daemon) []Finding
}

func checks() []check {
	return []check{
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
		{"cluster", checkCluster},
		{"limits", checkLimits},
		{"loop-devices", checkLoop},
	}
}

// Names lists the checks in the order in which they run.
func Names() []string {
	all := checks()
	names := make([]string, 0, len(all))
	for _, c := range all {
		names = append(names, c.name)
	}
	return names
}

// Run runs every check.
func Run(ctx context.Context, node Node, daemon Daemon) Report {
	report := Report{Findings: []Finding{}}
	for _, c := range checks() {
		for _, f := range c.run(ctx, node, daemon) {
			f.Check = c.name
			report.Findings = append(report.Findings, f)
		}
	}
	return report
}
