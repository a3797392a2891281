// Package doctor checks one node for what would keep deferred volumes from working on it. Every check is a small
// function of a Node, whose paths are injected, and of what the daemon reported, which may be nothing.
package doctor

import (
	"cmp"
	"context"
	"fmt"
	"os"
	"slices"
	"strings"
	"sync"

	"github.com/crust-proxy/crust-proxy/internal/tool/show"
	adminv1 "github.com/crust-proxy/crust-proxy/proto/crust/admin/v1"
)

// Daemon is what the daemon reported. Err is set if it did not answer all questions; then only the local checks run, and
// those of what it answered before.
type Daemon struct {
	Err error
	// Advice is what to do about Err. Starting is set if the daemon is being started, Absent if nobody listens.
	Advice           string
	Starting, Absent bool
	Node             *adminv1.GetNodeResponse
	Handlers         []*adminv1.Handler
	Volumes          []*adminv1.Volume
	// Again lists the volumes again, if it is set.
	Again func(context.Context) ([]*adminv1.Volume, error)
	// Drivers are nil if the front is off.
	Drivers []*adminv1.Driver
}

func (d Daemon) up() bool { return d.Err == nil }

// has reports whether the daemon is up and has a handler.
func (d Daemon) has(handler string) bool {
	return slices.ContainsFunc(d.Handlers, func(h *adminv1.Handler) bool { return h.GetName() == handler })
}

// scope is what a check needs.
type scope uint8

const (
	installed scope = iota // crust-proxy on this node
	before                 // nothing of crust-proxy's
	reported               // only what the daemon reported: it is skipped if that did not answer
)

type namedCheck struct {
	name  string
	needs scope
	run   func(context.Context, Node, Daemon) []Finding
}

var checks = []namedCheck{
	{"daemon", installed, checkDaemon},
	{"daemon-findings", reported, checkDaemonFindings},
	{"drivers", reported, checkDrivers},
	{"proof", reported, checkProof},
	{"handlers", reported, checkHandlers},
	{"volumes", reported, checkVolumes},
	{"sockets", installed, checkSockets},
	{"run-dir", installed, checkRunDir},
	{"kernel", before, checkKernel},
	{"programs", before, checkPrograms},
	{"kata-config", before, checkKataConfig},
	{"kata-directory", installed, checkKataDir},
	{"kata-volumes", installed, checkKataVolumes},
	{"kubelet", before, checkKubelet},
	{"mount-namespaces", installed, checkNamespaces},
	{"guards", installed, checkGuards},
	{"marks", installed, checkMarks},
	{"container-runtime", before, checkRuntime},
	{"cri-o", before, checkCRIO},
	{"cluster", installed, checkCluster},
	{"csidriver-objects", installed, checkCSIDrivers},
}

// Reported runs the checks that need only what the daemon of another node reported.
func Reported(ctx context.Context, service Service, daemon Daemon) Report {
	return run(ctx, Node{Service: service, Root: os.DevNull}, daemon, func(needs scope) bool { return needs == reported }) // below it there are no files
}

// Run runs all checks in parallel: on a node with thousands of volumes some of them read thousands of files.
func Run(ctx context.Context, node Node, daemon Daemon) Report {
	node.readTableOnce(ctx)
	return run(ctx, node, daemon, func(needs scope) bool { return needs == before || !node.Before })
}

func run(ctx context.Context, node Node, daemon Daemon, wanted func(scope) bool) Report {
	report, found := Report{Findings: []Finding{}}, make([][]Finding, len(checks))
	partial := map[string]bool{"daemon-findings": daemon.Node != nil, "proof": daemon.Node != nil, "handlers": daemon.Handlers != nil, "drivers": daemon.Drivers != nil}
	var running sync.WaitGroup
	for i, c := range checks {
		if wanted(c.needs) && (c.needs != reported || daemon.up() || partial[c.name]) {
			running.Go(func() { found[i] = c.run(ctx, node, daemon) })
		}
	}
	running.Wait()
	for i, c := range checks {
		for _, f := range found[i] {
			f.Check, f.URL = c.name, page+c.name
			report.Findings = append(report.Findings, f)
		}
	}
	return report
}

// Severity says how bad a finding is.
type Severity string

// The severities.
const (
	OK   Severity = "ok"
	Skip Severity = "skip" // it could not be looked at
	// Wait is for what has just started: it becomes one of the others soon.
	Wait  Severity = "wait"
	Warn  Severity = "warn"
	Error Severity = "error"
)

// Finding is the result of one check. Seen and Do may quote files and sandboxes: escape them before a terminal.
type Finding struct {
	Check    string   `json:"check"`
	Severity Severity `json:"severity"`
	Seen     string   `json:"seen"`
	// Do is what to do about it; empty if there is nothing to do.
	Do string `json:"do,omitempty"`
	// URL is where the check is described. It never changes, as the name of a check.
	URL string `json:"url"`
}

const page = "https://github.com/crust-proxy/crust-proxy/blob/main/docs/crustctl.md#check-"

// Report is all that one run found, in the order of the checks.
type Report struct {
	Findings []Finding `json:"findings"`
}

// Count counts the findings of a severity.
func (r Report) Count(s Severity) (n int) {
	for _, f := range r.Findings {
		if f.Severity == s {
			n++
		}
	}
	return n
}

func okay(format string, args ...any) Finding {
	return Finding{Severity: OK, Seen: fmt.Sprintf(format, args...)}
}

func skipped(format string, args ...any) Finding {
	return Finding{Severity: Skip, Seen: fmt.Sprintf(format, args...)}
}

func waiting(format string, args ...any) Finding {
	return Finding{Severity: Wait, Seen: "starting: " + fmt.Sprintf(format, args...)}
}

func warning(do, format string, args ...any) Finding {
	return Finding{Severity: Warn, Seen: fmt.Sprintf(format, args...), Do: do}
}

func failure(do, format string, args ...any) Finding {
	return Finding{Severity: Error, Seen: fmt.Sprintf(format, args...), Do: do}
}

// orOK returns the findings or, if there are none, one that says that all is well.
func orOK(found []Finding, format string, args ...any) []Finding {
	if len(found) > 0 {
		return found
	}
	return []Finding{okay(format, args...)}
}

// quoted quotes a name for a shell. An attacker may have chosen it, so that root runs it when pasting our advice.
func quoted(name string) string {
	const safe = "/._-=+:,@%abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789"
	if name != "" && name[0] != '-' && strings.Trim(name, safe) == "" {
		return name
	}
	return "'" + strings.ReplaceAll(name, "'", `'\''`) + "'"
}

// Service has the commands with which an operator manages the daemon: systemd's, or kubectl's if it runs in a pod.
type Service struct {
	InPod          bool
	Namespace, Pod string // empty where they are not known
}

// ServiceOf reads the variables that the DaemonSet sets in the container. Kubernetes' own
// variables prove nothing: a debug pod that enters a node's root has them too.
func ServiceOf(getenv func(string) string) Service {
	pod := getenv("POD_NAME")
	return Service{InPod: pod != "", Namespace: getenv("POD_NAMESPACE"), Pod: pod}
}

// Status shows the daemon's state.
func (s Service) Status() string { return s.either("systemctl status crust-proxy", "describe pod ") }

// Logs shows its log.
func (s Service) Logs() string { return s.either("journalctl -u crust-proxy", "logs ") }

// Restart restarts it on this node, and on no other.
func (s Service) Restart() string { return s.either("systemctl restart crust-proxy", "delete pod ") }

func (s Service) either(systemd, kubectl string) string {
	return show.Either(s.InPod, "kubectl -n "+cmp.Or(s.Namespace, "NAMESPACE")+" "+kubectl+cmp.Or(s.Pod, "POD"), systemd)
}
