package cluster

import (
	"cmp"
	"context"
	"fmt"
	"maps"
	"net/url"
	"slices"
	"strings"

	apierrors "k8s.io/apimachinery/pkg/api/errors"

	"github.com/crust-proxy/crust-proxy/internal/ground/sys"
	"github.com/crust-proxy/crust-proxy/internal/tool/command"
	"github.com/crust-proxy/crust-proxy/internal/tool/doctor"
	"github.com/crust-proxy/crust-proxy/internal/tool/printer"
	"github.com/crust-proxy/crust-proxy/internal/tool/show"
)

// checked is one line of check or test.
type checked struct {
	Component string `json:"component"`
	Result    string `json:"result"` // ok, warn or fail
	Seen      string `json:"seen"`
	Do        string `json:"do,omitempty"`
}

const (
	resultOK   = "ok"
	resultWarn = "warn"
	resultFail = "fail"
)

// worse returns a result unless all is well.
func worse(bad bool, result string) string { return show.Either(bad, result, resultOK) }

func namesIn(names []string) string {
	const most = 5
	if more := len(names) - most; more > 0 {
		return fmt.Sprintf("%s and %d more", strings.Join(names[:most], ", "), more)
	}
	return strings.Join(names, ", ")
}

// checkAll makes all checks. Without an API server, k is nil.
func checkAll(ctx context.Context, a *access, k *api, states []*state) (all []checked) {
	if k != nil {
		all = checkInstallation(ctx, a, k, states)
	}
	answered := slices.DeleteFunc(slices.Clone(states), func(s *state) bool { return s.err != nil })
	all = append(all, checked{"daemons", worse(len(answered) < len(states), resultFail), fmt.Sprintf("%d of %d nodes answer", len(answered), len(states)), ""})
	var silent []checked
	for _, s := range states {
		if s.err != nil {
			silent = append(silent, checked{"daemons", resultFail, fmt.Sprintf("node %s does not answer: %v", s.node, s.err),
				show.Either(apierrors.IsForbidden(s.err), "have yourself given the right to get pods/proxy, or nodes/proxy for --node-selector",
					"kubectl describe and logs of its pod; with the package: systemctl status crust-proxy, http.listen, and the control plane in its IPAddressAllow=")})
		}
	}
	if all = append(all, capped(silent)...); len(answered) == 0 {
		return all
	}
	all = append(all, compare("versions", answered, "of crust-proxy; this program is "+sys.Version(), "finish the upgrade, and use the same version here",
		func(s *state) string { return s.view.GetNode().GetVersion() }, sys.Version()))
	all = append(all, compare("configuration", answered, "in force", "crustctl nodes -o wide; a change is taken up within two minutes, or needs a restart",
		func(s *state) string { return show.ShortID(s.view.GetNode().GetConfigDigest()) }, ""))
	all = append(all, checkParts("driver", answered, (*state).driverProblems)...)
	all = append(all, checkParts("handler", answered, (*state).handlerProblems)...)
	return append(append(all, checkVolumes(answered)), checkFindings(answered)...)
}

// checkInstallation checks the DaemonSets, whose missing pods nobody else notices, or says that there are none.
func checkInstallation(ctx context.Context, a *access, k *api, states []*state) []checked {
	var version struct{ GitVersion string }
	if err := k.get(ctx, "/version", &version); err != nil {
		return []checked{{"cluster", resultFail, fmt.Sprintf("the API server %s does not answer: %v", k.host, err), ""}}
	}
	all := []checked{{"cluster", resultOK, "Kubernetes " + version.GitVersion + " at " + k.host, ""}}
	if a.nodeSelector != "" || !slices.ContainsFunc(states, func(s *state) bool { return s.pod != nil }) {
		return append(all, checked{"installation", resultOK, "by the package: no pods of crust-proxy are asked", ""})
	}
	sets, err := list[daemonSet](ctx, k, "/apis/apps/v1"+a.space()+"/daemonsets", url.Values{"labelSelector": {a.selector}})
	if err != nil {
		return append(all, checked{"installation", resultWarn, err.Error(), "it takes the right to list daemonsets to know of missing pods"})
	}
	for _, set := range sets {
		s, name := set.Status, set.Metadata
		if !slices.ContainsFunc(states, func(s *state) bool { return s.pod != nil && s.pod.Metadata.Namespace == name.Namespace }) {
			continue // anybody may have a DaemonSet with our label, and its pods do not count
		}
		all = append(all, checked{"installation", worse(s.NumberReady < max(1, s.DesiredNumberScheduled), resultFail),
			fmt.Sprintf("DaemonSet %s/%s: %d of %d pods ready, %d up to date", name.Namespace, name.Name, s.NumberReady, s.DesiredNumberScheduled, s.UpdatedNumberScheduled),
			"kubectl -n " + name.Namespace + " describe daemonset " + name.Name})
	}
	return append(all, checked{"installation", resultOK, "only pods were asked; nodes that have the package are asked with --node-selector", ""})
}

// compare warns of a value that not all nodes have, or not the one that is wanted.
func compare(component string, states []*state, what, do string, value func(*state) string, wanted string) checked {
	nodes := make(map[string][]string)
	for _, s := range states {
		nodes[value(s)] = append(nodes[value(s)], s.node)
	}
	var parts []string
	for _, one := range slices.Sorted(maps.Keys(nodes)) {
		parts = append(parts, cmp.Or(one, "unknown")+" on "+show.Count(len(nodes[one]), "node")+show.When(len(nodes) > 1, " ("+namesIn(nodes[one])+")"))
	}
	differ := len(nodes) > 1 || wanted != "" && nodes[wanted] == nil
	return checked{component, worse(differ, resultWarn), strings.Join(parts, "; ") + " " + what, show.When(differ, do)}
}

// driverProblems has each driver's name, with what is wrong with it or "". Of two registrars the ready one counts:
// checkFindings warns of the other, and of one without a name.
func (s *state) driverProblems() map[string]string {
	problems := map[string]string{}
	for _, d := range s.view.GetDrivers().GetDrivers() {
		if _, another := problems[d.GetName()]; d.GetName() != "" && (d.GetReady() || !another) {
			problems[d.GetName()] = cmp.Or(show.When(d.GetDirectlyRegistered(), "it is registered with kubelet directly, too"), d.GetProblem(),
				show.When(!d.GetReady(), "not ready"), show.When(strings.HasPrefix(d.GetKubeletStatus(), "refused: "), d.GetKubeletStatus()))
		}
	}
	return problems
}

func (s *state) handlerProblems() map[string]string {
	problems := map[string]string{}
	for _, h := range s.view.GetHandlers().GetHandlers() {
		problems[h.GetName()] = show.When(!h.GetHealthy(), cmp.Or(h.GetProblem(), "cannot work"))
	}
	return problems
}

// checkParts has a line for each driver or handler, with the nodes where it does not work.
func checkParts(kind string, states []*state, problems func(*state) map[string]string) (all []checked) {
	works, fails, why := map[string]int{}, map[string][]string{}, map[string]string{}
	for _, s := range states {
		for name, problem := range problems(s) {
			works[name] += show.Either(problem == "", 1, 0) // also so that it is known
			if problem != "" {
				fails[name], why[name] = append(fails[name], s.node), problem
			}
		}
	}
	for _, name := range slices.Sorted(maps.Keys(works)) {
		one := checked{kind + " " + name, resultOK, "works on " + show.Count(works[name], "node"), ""}
		if bad := fails[name]; len(bad) > 0 {
			one = checked{kind + " " + name, resultFail, fmt.Sprintf("%s, not on %s: %s", one.Seen, namesIn(bad), why[name]),
				"crustctl doctor on such a node"}
		}
		all = append(all, one)
	}
	return all
}

func checkVolumes(states []*state) checked {
	sums, total, forced := map[string]int64{}, int64(0), int64(0)
	for _, s := range states {
		forced += s.view.GetNode().GetVolumesReleasedByForce()
		for state, n := range s.view.GetNode().GetVolumesByState() {
			sums[state], total = sums[state]+n, total+n
		}
	}
	text := show.Count(int(total), "volume")
	for _, state := range slices.Sorted(maps.Keys(sums)) {
		text += fmt.Sprintf(", %d %s", sums[state], state)
	}
	text += show.When(forced > 0, fmt.Sprintf(" (%d released by force)", forced))
	result := show.Either(sums["degraded"]+forced > 0, resultFail, worse(sums["refused"]+sums["held"]+sums["removing"] > 0, resultWarn))
	return checked{"volumes", result, text, "kubectl crust volumes --state degraded (or refused, held, removing: no fault for a moment) -o wide"}
}

// capped cuts off lines of one component, the worst of which are first.
func capped(all []checked) []checked {
	const most = 20
	if more := len(all) - most; more > 0 {
		return append(all[:most], checked{all[most].Component, all[most].Result, fmt.Sprintf("and %d more", more), ""})
	}
	return all
}

// someTime matches a time: findings that differ by it only are one.
var someTime = sys.LazyRegexp(`\d{4}-\d\d-\d\dT[\d:.]+(Z|[+-]\d\d:\d\d)`)

// checkFindings has a line for each finding of the daemons, with the nodes that have it. What the lines above say
// already is left out.
func checkFindings(states []*state) []checked {
	nodes, found := map[string][]string{}, map[string]doctor.Finding{}
	for _, s := range states {
		for _, f := range s.findings {
			if f.Check == "daemon-findings" || f.Check == "proof" || f.Check == "drivers" && f.Severity == doctor.Warn {
				seen := someTime().ReplaceAllString(f.Seen, "(a time)")
				nodes[seen], found[seen] = append(nodes[seen], s.node), f
			}
		}
	}
	if len(found) == 0 {
		return []checked{{"findings", resultOK, "no daemon reports a problem", ""}}
	}
	var all []checked
	for _, seen := range slices.Sorted(maps.Keys(found)) {
		result := show.Either(found[seen].Severity == doctor.Error, resultFail, resultWarn)
		all = append(all, checked{"findings", result, namesIn(nodes[seen]) + ": " + show.Either(len(nodes[seen]) > 1, seen, found[seen].Seen), found[seen].Do})
	}
	slices.SortStableFunc(all, func(a, b checked) int { return strings.Compare(a.Result, b.Result) }) // fail is before warn
	return capped(all)
}

func printChecked(out *printer.Printer, c checked) error {
	colour := map[string]string{resultOK: show.Green, resultWarn: show.Yellow, resultFail: show.Red}[c.Result]
	line := fmt.Sprintf("%s %-22s %s", out.Paint(colour, fmt.Sprintf("%-4s", c.Result)), show.Escape(c.Component), show.Escape(c.Seen))
	_, err := fmt.Fprintln(out.Out, line+show.When(c.Do != "", out.Field(28, "do:", c.Do)))
	return err
}

// printAll prints all lines. Its error is command.ErrFindings if one of them failed.
func printAll(out *printer.Printer, all []checked) error {
	for i, c := range all {
		all[i].Do = show.When(c.Result != resultOK, c.Do)
	}
	err := out.Result(map[string]any{"checks": all}, func() (err error) {
		for _, c := range all {
			err = cmp.Or(err, printChecked(out, c))
		}
		return err
	})
	if err == nil && slices.ContainsFunc(all, func(c checked) bool { return c.Result == resultFail }) {
		return command.ErrFindings
	}
	return err
}
