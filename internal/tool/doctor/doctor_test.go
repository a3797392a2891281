package doctor

import (
	"context"
	"errors"
	"fmt"
	"net/http"
	"net/http/httptest"
	"os"
	"runtime"
	"slices"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"
	"google.golang.org/protobuf/types/known/timestamppb"

	"github.com/crust-proxy/crust-proxy/internal/front/policy"
	"github.com/crust-proxy/crust-proxy/internal/tool/show"
	"github.com/crust-proxy/crust-proxy/pkg/runtime/abi"
	adminv1 "github.com/crust-proxy/crust-proxy/proto/crust/admin/v1"
	"github.com/crust-proxy/crust-proxy/test/check"
)

func TestHealthyNodeHasOnlyOK(t *testing.T) {
	tr := newTree(t)
	dir := tr.kataVolume(targetA, goodInfo)
	tr.write(dir+"/"+live, "")
	tr.mkdir("/run/vc/sbs/"+live, 0o700)
	tr.mount("40", targetA, "tmpfs", abi.GuardPrefix+idOf(targetA))
	report := Run(context.Background(), tr.node, withVolume(adminv1.VolumeState_VOLUME_STATE_BOUND, ""))
	checked := map[string]bool{}
	for _, f := range report.Findings {
		checked[f.Check] = true
		check.That(t, f.Severity == OK || f.Check == "mount-namespaces" && f.Severity == Skip, "%s: %s: %s", f.Check, f.Severity, f.Seen)
	}
	page := check.Value(os.ReadFile("../../../docs/crustctl.md"))(t)
	for _, c := range checks {
		check.That(t, checked[c.name], "check %s said nothing", c.name)
		check.That(t, strings.Contains(string(page), `| <a id="check-`+c.name+"\"></a>`"+c.name+"` |"), "check %s has no row in the page, where Finding.URL leads", c.name)
	}
}

func TestLocalChecksRunWithTheDaemonDown(t *testing.T) {
	tr := newTree(t)
	tr.write(tr.node.Config.RunDir+"/daemon.lock", "")
	lock := check.Value(os.Open(tr.node.at(tr.node.Config.RunDir + "/daemon.lock")))(t)
	defer func() { _ = lock.Close() }()
	check.Must(t, unix.Flock(int(lock.Fd()), unix.LOCK_EX))
	down := Daemon{Err: errors.New("connection refused"), Advice: "start it"}
	report := Run(t.Context(), tr.node, down)
	check.That(t, report.Count(Error) == 1, "who does not answer and may listen is to be ended: %+v", report.Findings)
	report = Run(t.Context(), tr.node, Daemon{Node: &adminv1.GetNodeResponse{Version: "v0"}})
	check.That(t, strings.Contains(report.Findings[0].Seen, "crust-proxy v0 answers") && report.Findings[0].Severity == Warn,
		"a daemon of another version is %+v", report.Findings[0])
	known := down
	known.Node = &adminv1.GetNodeResponse{Findings: []string{"no xfs"}}
	report = Run(t.Context(), tr.node, known)
	check.That(t, report.Count(Warn) == 1, "what it answered before is not shown: %+v", report.Findings)
	down.Absent = true
	report = Run(t.Context(), tr.node, down)
	holder := fmt.Sprintf("process %d (", os.Getpid())
	check.That(t, report.Count(Error) == 2 && report.Findings[0].Do == "start it" && strings.Contains(report.Findings[1].Seen, holder),
		"got %+v", report.Findings)
	check.That(t, report.Count(OK) >= 10, "only %d checks passed", report.Count(OK))
}

// TestBeforeInstallation: nothing of crust-proxy's is looked for, and all else is.
func TestBeforeInstallation(t *testing.T) {
	tr := newTree(t)
	tr.remove(tr.node.Config.RunDir)
	tr.node.Before = true
	report := Run(t.Context(), tr.node, Daemon{Err: errors.New("not asked")})
	var names []string
	for _, f := range report.Findings {
		check.That(t, f.Severity == OK && strings.HasSuffix(f.URL, "#check-"+f.Check), "%+v", f)
		names = append(names, f.Check)
	}
	want := []string{"kernel", "programs", "kata-config", "kubelet", "container-runtime", "cri-o"}
	names = slices.Compact(names)
	check.That(t, slices.Equal(names, want), "the checks are %q", names)
}

type bad struct {
	name  string
	check string
	spoil func(tree, *Node, *Daemon)
	want  Severity
	seen  string
	do    string
}

func TestEachFault(t *testing.T) {
	all := slices.Concat(daemonFaults(), driverFaults(), fileFaults(), kataFaults(), guardFaults())
	for _, c := range all {
		t.Run(c.check+"/"+c.name, func(t *testing.T) {
			tr := newTree(t)
			node, daemon := tr.node, healthyDaemon()
			c.spoil(tr, &node, &daemon)
			assertFinding(t, findingsOf(t, c.check, node, daemon), c)
		})
	}
}

// TestAdviceInAPod: there is no unit of crust-proxy on a node where a DaemonSet runs it.
func TestAdviceInAPod(t *testing.T) {
	named := 0
	for _, c := range slices.Concat(daemonFaults(), driverFaults(), fileFaults(), kataFaults(), guardFaults()) {
		tr := newTree(t)
		node, daemon := tr.node, healthyDaemon()
		node.Service = ServiceOf(func(key string) string {
			return map[string]string{"POD_NAME": "crust-proxy-x7k2p", "POD_NAMESPACE": "storage"}[key]
		})
		c.spoil(tr, &node, &daemon)
		for _, f := range findingsOf(t, c.check, node, daemon) {
			for _, wrong := range []string{"journalctl", "crust-proxy.service", "systemctl restart", "systemctl cat", "systemctl status crust-proxy", "SocketMode"} {
				check.That(t, !strings.Contains(f.Do, wrong), "%s/%s: in a pod there is no %q: %s", c.check, c.name, wrong, f.Do)
			}
			if strings.Contains(f.Do, "kubectl -n storage ") && strings.Contains(f.Do, " crust-proxy-x7k2p") {
				named++
			}
		}
	}
	check.That(t, named >= 5, "only %d findings name the pod", named)
}

// assertFinding wants a finding as described. Where that is OK or Skip, nothing is wrong.
func assertFinding(t *testing.T, got []Finding, c bad) {
	t.Helper()
	bad := slices.ContainsFunc(got, func(f Finding) bool { return f.Severity != OK && f.Severity != Skip })
	check.That(t, !bad || c.want != OK && c.want != Skip, "found %+v", got)
	for _, f := range got {
		if f.Severity == c.want && strings.Contains(f.Seen, c.seen) && strings.Contains(f.Do, c.do) {
			check.That(t, f.Severity != Error || f.Do != "", "an error without advice: %+v", f)
			return
		}
	}
	t.Errorf("no %s with %q and advice %q in %+v", c.want, c.seen, c.do, got)
}

func daemonFaults() []bad {
	volumeAs := func(state adminv1.VolumeState, lastError string, change func(*adminv1.Volume)) func(tree, *Node, *Daemon) {
		return func(_ tree, _ *Node, d *Daemon) {
			*d = withVolume(state, lastError)
			change(d.Volumes[0])
		}
	}
	return []bad{
		{"findings", "daemon-findings", func(_ tree, _ *Node, d *Daemon) { d.Node.Findings = []string{"no xfs"} }, Warn, "no xfs", "journalctl"},
		{"findings that are errors", "daemon-findings", func(_ tree, _ *Node, d *Daemon) {
			d.Node.Findings, d.Node.Errors = []string{"blind", "no xfs"}, []string{"blind"}
		}, Error, "blind", "journalctl"},
		{"scan", "proof", func(_ tree, _ *Node, d *Daemon) { d.Node.ProofReason = "no BTF" }, Warn, "no BTF", "operations.md"},
		{"no handler", "handlers", func(_ tree, _ *Node, d *Daemon) { d.Handlers = nil }, Error, "no runtime handler", "configure"},
		{"unhealthy", "handlers", func(_ tree, _ *Node, d *Daemon) { d.Handlers[0] = &adminv1.Handler{Name: "kata", Problem: "no dir"} }, Error, "no dir", "handlers"},
		{"degraded", "volumes", volumeAs(adminv1.VolumeState_VOLUME_STATE_DEGRADED, "device gone", func(*adminv1.Volume) {}), Error, "device gone", "crustctl get"},
		{"last error", "volumes", volumeAs(adminv1.VolumeState_VOLUME_STATE_BOUND, "stats timed out", func(*adminv1.Volume) {}), Warn, "stats timed out", "crustctl get"},
		{"abnormal", "volumes", volumeAs(adminv1.VolumeState_VOLUME_STATE_BOUND, "no answer since", func(v *adminv1.Volume) {
			v.Condition = &adminv1.VolumeCondition{Abnormal: true, Message: "bad blocks"}
		}), Error, "bad blocks", "sandbox"},
		{"degraded and held", "volumes", volumeAs(adminv1.VolumeState_VOLUME_STATE_DEGRADED, "no answer since", func(v *adminv1.Volume) {
			v.HeldBy, v.HeldSince = "process 7", timestamppb.New(time.Now().Add(-48*time.Hour))
		}), Warn, "open in process 7 for 2d", "crustctl end"},
		{"frozen, and an error", "volumes", volumeAs(adminv1.VolumeState_VOLUME_STATE_BOUND, "stats timed out", func(v *adminv1.Volume) {
			v.FrozenSince = timestamppb.Now()
		}), Warn, "stats timed out", "crustctl get"},
		{"released by force", "volumes", volumeAs(adminv1.VolumeState_VOLUME_STATE_HELD, "its device is open", func(v *adminv1.Volume) {
			v.ReleasedByForce, v.HeldBy, v.Device, v.Handler = true, "process 7", "/dev/x", "crust"
		}), Error, "/dev/x is still open in process 7", "where that has gone: end its sandbox"},
		{"held", "volumes", volumeAs(adminv1.VolumeState_VOLUME_STATE_REMOVING, "its device is open", func(v *adminv1.Volume) {
			v.HeldBy, v.HeldSince = "process 7", timestamppb.New(time.Now().Add(-48*time.Hour))
		}), Warn, "open in process 7 for 2d", "crustctl end"},
		{"frozen", "volumes", volumeAs(adminv1.VolumeState_VOLUME_STATE_BOUND, "", func(v *adminv1.Volume) {
			v.FrozenSince, v.FrozenUntil = timestamppb.New(time.Now().Add(-48*time.Hour)), timestamppb.New(time.Now().Add(49*time.Hour))
		}), Warn, "held for 2d, and go on by themselves in 2d", "crustctl thaw " + idOf(targetA)[:12]},
		{"group ignored", "volumes", volumeAs(adminv1.VolumeState_VOLUME_STATE_BOUND, "", func(v *adminv1.Volume) {
			v.PodNamespace, v.PodName, v.SupplementalGroup, v.GroupProblem = "ns", "web", "2000", "fsGroup is ignored"
		}), Warn, "of pod ns/web with group 2000: fsGroup is ignored", "crustctl get"},
		{"group ignored, pod by UID", "volumes", volumeAs(adminv1.VolumeState_VOLUME_STATE_BOUND, "", func(v *adminv1.Volume) {
			v.PodUid, v.SupplementalGroup, v.GroupProblem = "uid-1", "2000", "fsGroup is ignored"
		}), Warn, "of pod uid-1 with group 2000: fsGroup is ignored", "crustctl get"},
		{"kata handler without kata", "kata-config", func(tr tree, _ *Node, _ *Daemon) { tr.remove("/etc/kata-containers") }, Warn, "no Kata configuration", "install"},
		{"kata handler in a pod", "kata-config", func(tr tree, n *Node, _ *Daemon) { tr.remove("/etc/kata-containers"); n.Service.InPod = true }, Skip, "from this pod", ""},
		{"kata handler without kata", "handlers", func(tr tree, _ *Node, _ *Daemon) { tr.remove("/etc/kata-containers") }, OK, "no configuration of Kata", ""},
	}
}

func driverFaults() []bad {
	is := func(d *adminv1.Driver) func(tree, *Node, *Daemon) {
		return func(_ tree, _ *Node, known *Daemon) { known.Drivers = []*adminv1.Driver{d} }
	}
	fresh, older := timestamppb.New(time.Now().Add(time.Hour)), timestamppb.New(time.Now().Add(-48*time.Hour))
	const waits = "waiting for kubelet"
	return []bad{
		{"fine", "drivers", is(&adminv1.Driver{Name: "a", Ready: true, Since: fresh}), OK, "1 drivers", ""},
		{"down", "drivers", is(&adminv1.Driver{Name: "a", Since: older, Problem: "no answer"}), Error, "driver a has not been ready for 2d, and kubelet's calls to it fail: no answer", "pod"},
		{"down for a moment", "drivers", is(&adminv1.Driver{Name: "a", Since: fresh, Problem: "no answer"}), Wait, "driver a: no answer", ""},
		{"no registrar", "drivers", is(&adminv1.Driver{Since: older, Problem: "no answer of /r.sock"}), Warn, "/r.sock", "socket"},
		{"not in CSINode", "drivers", is(&adminv1.Driver{Name: "a", Ready: true, Since: older, Problem: "not in the CSINode"}), Error, "not in the CSINode", "csinode"},
		{"kubelet is slow", "drivers", is(&adminv1.Driver{Name: "a", Ready: true, WaitingSince: fresh, KubeletStatus: waits}), Wait, waits, ""},
		{"kubelet is away", "drivers", is(&adminv1.Driver{Name: "a", Ready: true, WaitingSince: older, KubeletStatus: waits}), Warn, "for 2d: " + waits, "kubeletRegistry"},
		{"kubelet refuses", "drivers", is(&adminv1.Driver{Name: "a", Ready: true, WaitingSince: fresh, KubeletStatus: "refused: the same name"}), Error, "the same name", "remove"},
		{"kubelet refuses, said by the daemon", "drivers", is(&adminv1.Driver{Name: "a", Since: older, Problem: "kubelet refused: no", KubeletStatus: "refused: no"}), Error, "register driver a: kubelet refused: no", "remove"},
		{"bypasses us", "drivers", is(&adminv1.Driver{Name: "a", Ready: true, DirectlyRegistered: true}), Error, "driver a is registered with kubelet directly", "CrustProxyDriverBypassed"},
		{"a second registrar", "drivers", func(_ tree, _ *Node, d *Daemon) {
			d.Drivers = []*adminv1.Driver{{Name: "a", Ready: true}, {Name: "a", Since: older, Problem: "registered already"}}
		}, Warn, "registered already", "second registrar"},
	}
}

// TestNothingIsWrongInTheFirstSeconds: what the daemon has not found yet is no fault of the node.
func TestNothingIsWrongInTheFirstSeconds(t *testing.T) {
	const follows, file = "sandboxes cannot be followed (it has not answered yet)", "the configuration file is bad since today"
	for text, wants := range map[string]map[time.Duration]Severity{
		follows: {-time.Hour: Wait, settleTime: Warn}, file: {-time.Hour: Warn, settleTime: Warn},
	} {
		for age, want := range wants {
			daemon := healthyDaemon()
			daemon.Node.StartedAt, daemon.Node.Findings = timestamppb.New(time.Now().Add(-age)), []string{text}
			assertFinding(t, findingsOf(t, "daemon-findings", newTree(t).node, daemon), bad{want: want, seen: text})
		}
	}
}

func fileFaults() []bad {
	run := func(spoil func(tree, *Node)) func(tree, *Node, *Daemon) {
		return func(tr tree, n *Node, _ *Daemon) { spoil(tr, n) }
	}
	beside := func(other, mounts string) func(tree, *Node, *Daemon) {
		return run(func(tr tree, _ *Node) {
			tr.process("10", "crust-proxy", "mnt:[1]")
			tr.process("11", other, mounts)
		})
	}
	notOnTmpfs := strings.Replace(mountsOK, "tmpfs tmpfs", "ext4 /dev/sdb", 1)
	notShared := strings.Replace(mountsOK, "shared:1 ", "", 1)
	return []bad{
		{"missing", "sockets", run(func(tr tree, n *Node) { tr.remove(n.AdminSocket) }), Error, "does not exist", "systemctl"},
		{"missing runtime", "sockets", run(func(tr tree, n *Node) { tr.remove(n.Config.RuntimeSocket.Path) }), Error, "runtime socket", "systemctl"},
		{"open to all", "sockets", run(func(tr tree, n *Node) { tr.chmod(n.AdminSocket, 0o666) }), Error, "mode 0666", "SocketMode"},
		{"a file", "sockets", run(func(tr tree, n *Node) { tr.remove(n.AdminSocket); tr.write(n.AdminSocket, "") }), Error, "not a socket", "remove"},
		{"foreign owner", "sockets", run(func(tr tree, n *Node) {
			check.NeedsRoot(tr.t)
			check.Must(tr.t, os.Lchown(tr.node.at(n.AdminSocket), 12345, -1))
		}), Error, "uid 12345", "SocketMode"},
		{"writable parent", "sockets", run(func(tr tree, n *Node) { tr.chmod(n.Config.RunDir, 0o777) }), Error, "replace the socket", "chmod"},
		{"missing", "run-dir", run(func(tr tree, n *Node) { tr.remove(n.Config.RunDir) }), Error, "cannot be used", "RuntimeDirectory"},
		{"full", "run-dir", run(func(tr tree, n *Node) { tr.remove(n.Config.RunDir); tr.symlink("/proc", n.Config.RunDir) }), Error, "0 MiB", "du -xs"},
		{"on disk", "run-dir", run(func(tr tree, _ *Node) { tr.write("/proc/self/mountinfo", notOnTmpfs) }), Error, "not on tmpfs", "/run"},
		{"no openat2", "kernel", run(func(_ tree, n *Node) { n.Probe.Openat2 = func() error { return unix.ENOSYS } }), Error, "openat2", "5.6"},
		{"no guard", "kernel", run(func(_ tree, n *Node) { n.Probe.Guard = func() error { return unix.EOPNOTSUPP } }), Error, "immutable", "6.0"},
		{"untried", "kernel", run(func(_ tree, n *Node) { n.Probe.Guard = func() error { return fmt.Errorf("fsopen: %w", unix.EPERM) } }), Skip, "was not tried", ""},
		{"no e2fsprogs", "programs", run(func(tr tree, _ *Node) { tr.remove("/usr/sbin/e2fsck") }), Warn, "e2fsck is not installed", "e2fsprogs"},
		{"no xfsprogs", "programs", run(func(tr tree, _ *Node) { tr.remove("/usr/sbin/mkfs.xfs") }), OK, "mkfs.xfs is not installed", ""},
		{"missing", "kubelet", run(func(tr tree, n *Node) { tr.remove(n.Config.KubeletRoot) }), Warn, "not a directory", "kubeletRoot"},
		{"private", "kubelet", run(func(tr tree, _ *Node) { tr.write("/proc/self/mountinfo", notShared) }), Error, "not shared", "make-rshared"},
		{"kubelet elsewhere", "mount-namespaces", beside("kubelet", "mnt:[2]"), Error, "kubelet", "systemctl cat"},
		{"containerd gone", "container-runtime", run(func(tr tree, n *Node) { tr.remove(n.Config.Containerd.Socket) }), Warn, "cannot be reached", "containerd.socket"},
		{"CRI-O gone", "container-runtime", run(func(_ tree, n *Node) { n.Config.Containerd.Socket, n.Config.CRI.Socket = "", "/run/crio/crio.sock" }), Warn, "cannot be reached on /run/crio/crio.sock", "cri.socket"},
		{"one of both", "container-runtime", run(func(_ tree, n *Node) { n.Config.CRI.Socket = "/run/crio/crio.sock" }), Warn, "cannot be reached on /run/crio/crio.sock", "cri.socket"},
		{"CRI-O elsewhere", "mount-namespaces", beside("crio", "mnt:[2]"), Error, "crio", "systemctl cat"},
		{"shared", "mount-namespaces", beside("kubelet", "mnt:[1]"), OK, "shares its mounts with kubelet", ""},
		{"nothing is seen", "mount-namespaces", beside("k3s-server", "mnt:[2]"), Skip, "no process of kubelet", ""},
		{"unused", "container-runtime", run(func(_ tree, n *Node) { n.Config.Containerd.Socket = "" }), OK, "no container runtime", ""},
		{"no marks", "marks", run(func(_ tree, n *Node) { n.Config.Front.MarksDir = "/nowhere" }), Error, "cannot be read", "mkdir -p -m 0700"},
	}
}

// TestErrorsNameTheirVolumeOnce: most errors of the daemon name the volume themselves.
func TestErrorsNameTheirVolumeOnce(t *testing.T) {
	for _, text := range []string{"stats timed out", "volume " + targetA + ": stats timed out"} {
		got := findingsOf(t, "volumes", newTree(t).node, withVolume(adminv1.VolumeState_VOLUME_STATE_BOUND, text))
		check.That(t, len(got) == 1 && got[0].Seen == "volume "+targetA+": stats timed out", "%q: %+v", text, got)
	}
}

func kataFaults() []bad {
	in := func(spoil func(tree, string)) func(tree, *Node, *Daemon) {
		return func(tr tree, _ *Node, _ *Daemon) { spoil(tr, tr.kataVolume(targetA, goodInfo)) }
	}
	info := func(text string) func(tree, *Node, *Daemon) {
		return func(tr tree, _ *Node, _ *Daemon) { tr.kataVolume(targetA, text) }
	}
	return []bad{
		{"mode", "kata-directory", func(tr tree, n *Node, _ *Daemon) { tr.chmod(n.Config.Handlers.Kata.DirectVolumes, 0o755) }, Error, "mode 0755", "chmod"},
		{"FIFO", "kata-volumes", in(func(tr tree, dir string) {
			tr.remove(dir + "/" + abi.InfoName)
			check.Must(tr.t, unix.Mkfifo(tr.node.at(dir+"/"+abi.InfoName), 0o600))
		}), Error, "not a regular file", ""},
		{"temp file", "kata-volumes", in(func(tr tree, dir string) { tr.write(dir+"/mountInfo.json.tmp123", "") }), Error, "taken for a sandbox", "rm"},
		{"hidden file", "kata-volumes", in(func(tr tree, dir string) { tr.write(dir+"/.lock", "") }), Error, "taken for a sandbox", "rm"},
		{"filled file", "kata-volumes", in(func(tr tree, dir string) { tr.write(dir+"/"+live, "x") }), Error, "taken for a sandbox", "rm"},
		{"directory", "kata-volumes", in(func(tr tree, dir string) { tr.mkdir(dir+"/sub", 0o700) }), Error, "taken for a sandbox", "rm"},
		{"dead sandbox", "kata-volumes", in(func(tr tree, dir string) { tr.write(dir+"/"+live, "") }), Warn, "no such sandbox", "reconcile"},
		{"odd id", "kata-volumes", in(func(tr tree, dir string) { tr.write(dir+"/marker", "") }), Warn, "no such sandbox", "rm"},
		{"volume mode", "kata-volumes", in(func(tr tree, dir string) { tr.chmod(dir, 0o755) }), Warn, "mode 0755", "chmod"},
		{"no file", "kata-volumes", in(func(tr tree, dir string) { tr.remove(dir + "/" + abi.InfoName) }), Warn, "no mountInfo.json", "rm"},
		{"plain name", "kata-volumes", func(tr tree, n *Node, _ *Daemon) { tr.mkdir(n.Config.Handlers.Kata.DirectVolumes+"/pv-a", 0o700) }, Error, "no volume's", "base64"},
		{"no padding", "kata-volumes", func(tr tree, n *Node, _ *Daemon) { tr.mkdir(n.Config.Handlers.Kata.DirectVolumes+"/L2E", 0o700) }, Error, "no volume's", "padding"},
		{"standard alphabet", "kata-volumes", func(tr tree, n *Node, _ *Daemon) { tr.mkdir(n.Config.Handlers.Kata.DirectVolumes+"/L2E+Pj4+", 0o700) }, Error, "no volume's", "URL-safe"},
		{"relative", "kata-volumes", func(tr tree, n *Node, _ *Daemon) { tr.mkdir(n.Config.Handlers.Kata.DirectVolumes+"/YWJj", 0o700) }, Error, "no absolute path", "base64"},
		{"not listed", "kata-volumes", func(tr tree, n *Node, _ *Daemon) {
			tr.remove(n.Config.Handlers.Kata.DirectVolumes)
			tr.write(n.Config.Handlers.Kata.DirectVolumes, "")
		}, Warn, "cannot be listed", "root"},
		{"stray file", "kata-volumes", func(tr tree, n *Node, _ *Daemon) { tr.write(n.Config.Handlers.Kata.DirectVolumes+"/tmp", "") }, Error, "not a volume's directory", "remove"},
		{"torn", "kata-volumes", info(goodInfo[:20]), Error, "cut off", "rename"},
		{"null", "kata-volumes", info("null"), Error, "lacks the key", "program"},
		{"no fstype", "kata-volumes", info(`{"volume-type":"directvol","device":"/dev/x"}`), Error, `lacks the key "fstype"`, "program"},
		{"empty device", "kata-volumes", info(strings.Replace(goodInfo, "/dev/loop0", "", 1)), Error, `empty "device"`, "program"},
		{"number", "kata-volumes", info(strings.Replace(goodInfo, `"ext4"`, "4", 1)), Error, "no string", "program"},
		{"block type", "kata-volumes", info(strings.Replace(goodInfo, "directvol", "block", 1)), Error, "wants directvol", "program"},
		{"bind", "kata-volumes", info(strings.Replace(goodInfo, `"rw"`, `"bind"`, 1)), Error, "breaks Kata's Go", "program"},
		{"options", "kata-volumes", info(strings.Replace(goodInfo, `["rw"]`, `"rw"`, 1)), Error, "no list", "program"},
		{"metadata", "kata-volumes", info(strings.Replace(goodInfo, `"7"`, `7`, 1)), Error, "no map", "program"},
	}
}

func guardFaults() []bad {
	record := func(d *Daemon) { *d = withVolume(adminv1.VolumeState_VOLUME_STATE_PUBLISHED, "") }
	return []bad{
		{"stale", "guards", func(tr tree, _ *Node, _ *Daemon) { tr.mount("40", targetA, "tmpfs", abi.GuardPrefix+idOf(targetA)) }, Warn, "stale", "reconcile"},
		{"adopted", "guards", func(_ tree, _ *Node, d *Daemon) { *d = withVolume(adminv1.VolumeState_VOLUME_STATE_ADOPTED, "") }, OK, "each of 0 guards", ""},
		{"refused", "guards", func(_ tree, _ *Node, d *Daemon) { d.Err = errors.New("permission denied") }, Skip, "the daemon could not be asked", ""},
		{"only a bind", "guards", func(tr tree, _ *Node, d *Daemon) {
			record(d)
			tr.mount("40", "/elsewhere", "tmpfs", abi.GuardPrefix+idOf(targetA))
		}, Error, "no guard", "reconcile"},
		{"missing", "guards", func(_ tree, _ *Node, d *Daemon) { record(d) }, Error, "no guard", "reconcile"},
		{"unpublished meanwhile", "guards", func(_ tree, _ *Node, d *Daemon) {
			record(d)
			d.Again = func(context.Context) ([]*adminv1.Volume, error) { return nil, nil }
		}, OK, "each of 0 guards", ""},
		{"published meanwhile", "guards", func(tr tree, _ *Node, d *Daemon) {
			tr.mount("40", targetA, "tmpfs", abi.GuardPrefix+idOf(targetA))
			later := withVolume(adminv1.VolumeState_VOLUME_STATE_BOUND, "").Volumes
			d.Again = func(context.Context) ([]*adminv1.Volume, error) { return later, nil }
		}, OK, "each of 1 guards", ""},
		{"covered", "guards", func(tr tree, _ *Node, d *Daemon) {
			record(d)
			tr.mount("40", targetA, "tmpfs", abi.GuardPrefix+idOf(targetA))
			tr.mount("41", targetA, "ext4", "/dev/sdz")
		}, Error, "/dev/sdz (ext4) is mounted", "umount"},
	}
}

// TestKatasOwnEmptyDirIsFine: Kata keeps an emptyDir on a block image of its own, with a
// type of its own, and runtime-rs makes the directory with mode 0755.
func TestKatasOwnEmptyDirIsFine(t *testing.T) {
	const cache = "/var/lib/kubelet/pods/a/volumes/kubernetes.io~empty-dir/cache"
	info := strings.NewReplacer("directvol", "blk", "/dev/loop0", cache+"/disk.img").Replace(goodInfo)
	for name, c := range map[string]struct {
		target string
		mode   os.FileMode
		want   bad
	}{
		"Go":                {cache, 0o700, bad{want: OK, seen: "well formed"}},
		"runtime-rs":        {cache, 0o755, bad{want: OK, seen: "well formed"}},
		"writable":          {cache, 0o777, bad{want: Warn, seen: "mode 0777", do: "chmod"}},
		"of another volume": {targetA, 0o700, bad{want: Error, seen: "wants directvol", do: "program"}},
	} {
		t.Run(name, func(t *testing.T) {
			tr := newTree(t)
			tr.chmod(tr.kataVolume(c.target, info), c.mode)
			assertFinding(t, findingsOf(t, "kata-volumes", tr.node, healthyDaemon()), c.want)
		})
	}
	d := withVolume(adminv1.VolumeState_VOLUME_STATE_ADOPTED, "runtime-rs has no stats of it")
	d.Volumes[0].TargetPath = cache
	assertFinding(t, findingsOf(t, "volumes", newTree(t).node, d), bad{want: OK, seen: "none of 1"})
}

// TestVolumesThatGoMeanwhile: pods leave a node while doctor looks at it.
func TestVolumesThatGoMeanwhile(t *testing.T) {
	tr := newTree(t)
	dir := tr.kataVolume(targetA, goodInfo)
	entries := check.Value(os.ReadDir(tr.node.at(tr.node.Config.Handlers.Kata.DirectVolumes)))(t)
	v := kataVolume{tr.node, dir, targetA}
	tr.remove(dir)
	check.Empty(t, append(checkKataVolume(tr.node, entries[0]), v.checkInfo()...), "found")
}

func TestAdviceIsSafeToPaste(t *testing.T) {
	for name, want := range map[string]string{
		"/run/a_B-1=":    "/run/a_B-1=",
		"/run/$(reboot)": "'/run/$(reboot)'",
		"a b":            "'a b'",
		"it's;x":         `'it'\''s;x'`,
		"-rf":            "'-rf'",
		"":               "''",
	} {
		check.Equal(t, quoted(name), want, "quoted(%q)", name)
	}
}

// TestMountsThatGoBothWaysAreFine: a container in a mount namespace of its own, with
// kubelet's root on a mount of the node's peer group, or of another.
func TestMountsThatGoBothWaysAreFine(t *testing.T) {
	const inContainer = "60 50 0:99 / / rw - overlay overlay rw\n61 60 8:1 /var/lib/kubelet /var/lib/kubelet rw %s - ext4 /dev/sda1 rw\n"
	for optional, want := range map[string]Severity{"shared:1": OK, "shared:9": Error, "master:1": Error, "shared:9 master:1": Error} {
		tr := newTree(t)
		tr.process("10", "crust-proxy", "mnt:[1]")
		tr.write("/proc/10/mountinfo", fmt.Sprintf(inContainer, optional))
		tr.process("11", "kubelet", "mnt:[2]")
		tr.write("/proc/11/mountinfo", mountsOK)
		got := findingsOf(t, "mount-namespaces", tr.node, healthyDaemon())
		check.That(t, len(got) == 1 && got[0].Severity == want, "%s: got %+v", optional, got)
		check.That(t, want != Error || strings.Contains(got[0].Do, "Bidirectional"), "%s: the advice is %q", optional, got[0].Do)
	}
}

func TestProbesOfThisKernelLeaveNothing(t *testing.T) {
	p := DefaultNode().Probe
	for name, probe := range map[string]func() error{"openat2": p.Openat2, "guard": p.Guard} {
		before := openFiles(t)
		err := probe()
		check.That(t, err == nil || errors.Is(err, os.ErrPermission), "%s: %v", name, err)
		check.Equal(t, openFiles(t), before, "%s: open files", name)
	}
}

func openFiles(t *testing.T) int {
	t.Helper()
	entries := check.Value(os.ReadDir("/proc/self/fd"))(t)
	return len(entries)
}

func (tr tree) process(pid, comm, namespace string) {
	tr.write("/proc/"+pid+"/comm", comm+"\n")
	tr.symlink(namespace, "/proc/"+pid+"/ns/mnt")
}

func TestCRIO(t *testing.T) {
	const main, dropIn = "/etc/crio/crio.conf", "/etc/crio/crio.conf.d/"
	const off, on = "[crio.runtime]\ndrop_infra_ctr = false\n", "[crio.runtime]\ndrop_infra_ctr = true\n"
	for name, c := range map[string]struct {
		files   map[string]string
		handler string
		want    Severity
		seen    string
	}{
		"no configuration":      {nil, "crust", Error, "drop_infra_ctr = true (its default)"},
		"in a pod that sees it": {map[string]string{main: on}, "crust", Error, main + ":2"},
		"right":                 {map[string]string{main: off}, "crust", OK, main + ":2"},
		"a later file is right": {map[string]string{main: on, dropIn + "10-a.conf": off}, "crust", OK, "10-a.conf:2"},
		"a later file is wrong": {map[string]string{dropIn + "10-a.conf": off, dropIn + "20-b.conf": on}, "crust", Error, "20-b.conf:2"},
		"another table":         {map[string]string{main: "[crio.image]\ndrop_infra_ctr = false\n"}, "crust", Error, "its default"},
		"unreadable":            {map[string]string{main: "[crio"}, "crust", Warn, "cannot be read"},
		"unreadable drop-ins":   {map[string]string{strings.TrimSuffix(dropIn, "/"): ""}, "crust", Warn, "not a directory"},
		"without crust-runc":    {nil, "kata", OK, "crust-runc is not used"},
		"in a pod":              {nil, "crust", Skip, "cannot be seen from this pod"},
	} {
		t.Run(name, func(t *testing.T) {
			tr := newTree(t)
			node, daemon := tr.node, healthyDaemon()
			node.Config.Containerd.Socket, node.Config.CRI.Socket = "", "/var/run/crio/crio.sock"
			node.Service.InPod = strings.HasPrefix(name, "in a pod")
			daemon.Handlers = []*adminv1.Handler{{Name: c.handler}}
			for path, text := range c.files {
				tr.write(path, text)
			}
			assertFinding(t, findingsOf(t, "cri-o", node, daemon), bad{want: c.want, seen: c.seen})
		})
	}
}

// apiServer answers as one does that knows node-1, and writes a kubeconfig for it.
func apiServer(t *testing.T, tr tree, refuse string) {
	t.Helper()
	kinds := map[string]string{
		"/api/v1/pods": `{"apiVersion":"v1","kind":"PodList","metadata":{}}`,
		"/apis/node.k8s.io/v1/runtimeclasses": `{"apiVersion":"node.k8s.io/v1","kind":"RuntimeClassList","metadata":{},"items":[
			{"metadata":{"name":"vm","annotations":{"azure.csi.disk/kata-mount":"direct-volume"}},"handler":"kata-qemu"},
			{"metadata":{"name":"other","annotations":{"azure.csi.disk/kata-mount":"no"}},"handler":"kata-clh"}]}`,
		"/apis/storage.k8s.io/v1/csidrivers": `{"apiVersion":"storage.k8s.io/v1","kind":"CSIDriverList","metadata":{},"items":[
			{"metadata":{"name":"plain"},"spec":{"podInfoOnMount":false,"attachRequired":false,"fsGroupPolicy":"None"}},
			{"metadata":{"name":"tokens"},"spec":{"requiresRepublish":true,"seLinuxMount":true,"tokenRequests":[{"audience":"a"}]}}]}`,
		"/apis/storage.k8s.io/v1/csinodes/node-1":                             `{"apiVersion":"storage.k8s.io/v1","kind":"CSINode","metadata":{"name":"node-1"},"spec":{"drivers":[]}}`,
		"/api/v1/namespaces/default/persistentvolumeclaims/crust-proxy-trial": `{}`, "/api/v1/persistentvolumes/crust-proxy-trial": `{}`,
		"/api/v1/nodes/node-1": `{"apiVersion":"v1","kind":"Node","metadata":{"name":"node-1"}}`,
	}
	server := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		w.Header().Set("Content-Type", "application/json")
		if answer := kinds[r.URL.Path]; answer != "" && !strings.HasSuffix(r.URL.Path, refuse) && !strings.HasSuffix(r.URL.String(), refuse) {
			_, _ = fmt.Fprint(w, answer)
			return
		}
		w.WriteHeader(http.StatusForbidden)
		_, _ = fmt.Fprint(w, `{"apiVersion":"v1","kind":"Status","status":"Failure","reason":"Forbidden","code":403,"message":"forbidden"}`)
	}))
	t.Cleanup(server.Close)
	tr.write("/etc/kubernetes/kubelet.conf", fmt.Sprintf("apiVersion: v1\nkind: Config\ncurrent-context: c\n"+
		"clusters: [{name: c, cluster: {server: %q}}]\ncontexts: [{name: c, context: {cluster: c, user: u}}]\n"+
		"users: [{name: u, user: {token: t}}]\n", server.URL))
	tr.chmod("/etc/kubernetes/kubelet.conf", 0o600)
}

// TestCSIDriverObjects: what a deferred volume lacks, and nothing else.
func TestCSIDriverObjects(t *testing.T) {
	for _, c := range []struct {
		driver, mode, handler, selinux, refuse string
		bad
	}{
		{"plain", "block", "crust", "", "nothing", bad{want: OK, seen: "nothing that"}},
		{"tokens", "block", "kata", "", "nothing", bad{want: Warn, seen: "driver tokens: its CSIDriver object has requiresRepublish", do: "defer: false"}},
		{"tokens", "native", "kata", "1", "nothing", bad{want: OK, seen: "nothing that"}},
		{"plain", "block", "crust", "1", "nothing", bad{want: Warn, seen: "seLinuxMount", do: "seLinuxMount: true"}},
		{"plain", "block", "crust", "in a pod", "nothing", bad{want: Warn, seen: "seLinuxMount", do: "seLinuxMount: true"}},
		{"plain", "block", "crust", "without a policy", "nothing", bad{want: OK, seen: "nothing that"}},
		{"plain", "block", "crust", "0", "nothing", bad{want: OK, seen: "nothing that"}},
		{"plain", "block", "kata", "1", "nothing", bad{want: OK, seen: "nothing that"}},
		{"tokens", "native", "crust", "1", "nothing", bad{want: OK, seen: "nothing that"}},
		{"of no object", "block", "crust", "1", "nothing", bad{want: OK, seen: "nothing that"}},
		{"", "block", "crust", "1", "nothing", bad{want: Skip, seen: "did not say"}},
		{"tokens", "block", "crust", "1", "csidrivers", bad{want: Skip, seen: "not looked at: the API server does not allow it"}},
	} {
		tr := newTree(t)
		node, daemon := tr.node, healthyDaemon()
		node.Config.Cluster.Kubeconfig, node.Config.Cluster.NodeName = "/etc/kubernetes/kubelet.conf", "node-1"
		node.Service.InPod = c.selinux == "in a pod"
		apiServer(t, tr, c.refuse)
		tr.write("/proc/filesystems", "nodev\tsysfs\n"+show.When(c.selinux != "", "nodev\tselinuxfs\n")+"\text4\n")
		if c.selinux == "0" || c.selinux == "1" {
			tr.write("/sys/fs/selinux/enforce", c.selinux)
		}
		daemon.Handlers[0].Name, daemon.Drivers = c.handler, []*adminv1.Driver{{Name: c.driver, Mode: c.mode}}
		if c.driver == "" {
			daemon = Daemon{Err: errors.New("connection refused")}
		}
		assertFinding(t, findingsOf(t, "csidriver-objects", node, daemon), c.bad)
	}
}

// TestAzureDiskAndWeHandVolumesToKata: both do so for the pods of one class.
func TestAzureDiskAndWeHandVolumesToKata(t *testing.T) {
	azure := func(rules ...policy.Rule) []policy.Rule {
		return append([]policy.Rule{{Name: "others", Drivers: []string{"ebs*"}, Defer: true}}, rules...)
	}
	host := policy.Rule{Drivers: []string{azureDisk}}
	for name, c := range map[string]struct {
		driver, refuse string
		rules          []policy.Rule
		bad
	}{
		"all classes":      {azureDisk, "nothing", azure(policy.Rule{Defer: true}), bad{want: Warn, seen: "RuntimeClass vm has the annotation azure.csi.disk/kata-mount", do: "defer: false"}},
		"this class, xfs":  {azureDisk, "nothing", azure(policy.Rule{Defer: true, RuntimeHandlers: []string{"kata-qemu"}, Filesystems: []string{"xfs"}}), bad{want: Warn, seen: "pods do not start"}},
		"if a pod asks":    {azureDisk, "nothing", azure(policy.Rule{Defer: true, Annotated: true, AccessModes: []string{"ReadWriteOncePod"}}), bad{want: Warn, seen: "RuntimeClass vm"}},
		"some namespaces":  {azureDisk, "nothing", azure(policy.Rule{Defer: true, Namespaces: []string{"shop"}, StorageClasses: []string{"fast"}}), bad{want: Warn, seen: "RuntimeClass vm"}},
		"ext4 on the host": {azureDisk, "nothing", azure(policy.Rule{Filesystems: []string{"ext4"}}, policy.Rule{Defer: true, Filesystems: []string{"ext4", "xfs"}}), bad{want: Warn, seen: "RuntimeClass vm"}},
		"all on the host":  {azureDisk, "nothing", azure(host, policy.Rule{Defer: true}), bad{want: OK, seen: "nothing that"}},
		"another class":    {azureDisk, "nothing", azure(policy.Rule{Defer: true, RuntimeHandlers: []string{"kata-clh"}}), bad{want: OK, seen: "nothing that"}},
		"not deferred":     {azureDisk, "nothing", azure(policy.Rule{}), bad{want: OK, seen: "nothing that"}},
		"another driver":   {"ebs.csi.aws.com", "nothing", azure(policy.Rule{Defer: true}), bad{want: OK, seen: "nothing that"}},
		"not known":        {azureDisk, "runtimeclasses", azure(policy.Rule{Defer: true}), bad{want: Skip, seen: "RuntimeClasses are not looked at"}},
	} {
		t.Run(name, func(t *testing.T) {
			tr := newTree(t)
			node, daemon := tr.node, healthyDaemon()
			node.Config.Cluster.Kubeconfig, node.Config.Cluster.NodeName, node.Config.Policy.Rules = "/etc/kubernetes/kubelet.conf", "node-1", c.rules
			apiServer(t, tr, c.refuse)
			daemon.Drivers = []*adminv1.Driver{{Name: c.driver, Mode: "block"}}
			got := findingsOf(t, "csidriver-objects", node, daemon)
			assertFinding(t, got, c.bad)
			check.That(t, len(got) == 1, "%d findings: %+v", len(got), got)
		})
	}
}

// TestMarksWithoutRoot: whoever may not list the marks is not told to restore them.
func TestMarksWithoutRoot(t *testing.T) {
	tr, found := newTree(t), make(chan Finding)
	dir := tr.node.at(tr.node.Config.Front.MarksDir)
	check.Must(t, os.Chmod(dir, 0))
	defer func() { check.Must(t, os.Chmod(dir, 0o700)) }() // so that it can be removed
	go func() {
		runtime.LockOSThread() // it ends with this function
		check.Must(t, check.Err(unix.SetfsuidRetUid(65534)))
		found <- checkMarks(t.Context(), tr.node, Daemon{})[0]
	}()
	got := <-found
	check.That(t, got.Severity == Warn && got.Do == "run crustctl doctor as root", "got %+v", got)
}

// TestRulesByThePod: each condition that another pod of the volume need not meet.
func TestRulesByThePod(t *testing.T) {
	tr := newTree(t)
	tr.node.Config.Policy.Rules = []policy.Rule{
		{Name: "disks", Drivers: []string{"ebs*"}, Defer: true}, {Name: "kata", RuntimeHandlers: []string{"kata"}, Defer: true},
		{Name: "needs", Needs: []string{policy.NeedSubPath}}, {Name: "shop", Namespaces: []string{"shop"}, Defer: true},
	}
	got := findingsOf(t, "marks", tr.node, healthyDaemon())
	check.That(t, strings.Contains(got[0].Seen, `the rules "kata", "needs", "shop" depend on the pod`), "got %q", got[0].Seen)
}

func TestCluster(t *testing.T) {
	cases := []bad{
		{"off", "cluster", func(_ tree, n *Node, _ *Daemon) { n.Config.Cluster.Kubeconfig = "" }, OK, "no cluster is asked", ""},
		{"in cluster", "cluster", func(_ tree, n *Node, _ *Daemon) { n.Config.Cluster.InCluster = true }, Skip, "service account", ""},
		{"all is well", "cluster", func(tr tree, _ *Node, _ *Daemon) { apiServer(t, tr, "nothing") }, OK, "node node-1", ""},
		{"no file", "cluster", func(tree, *Node, *Daemon) {}, Error, "does not exist", "docs/front.md"},
		{"no right", "cluster", func(tr tree, _ *Node, _ *Daemon) { apiServer(t, tr, "csidrivers") }, Error, "CSI drivers can be listed", "docs/front.md"},
		{"no watch", "cluster", func(tr tree, _ *Node, _ *Daemon) { apiServer(t, tr, "csidrivers?timeoutSeconds=1&watch=1") }, Error, "CSI drivers can be watched", "docs/front.md"},
		{"no claims", "cluster", func(tr tree, _ *Node, _ *Daemon) { apiServer(t, tr, "persistentvolumeclaims/crust-proxy-trial") }, Error, "claims can be read", "docs/front.md"},
		{"no CSINode", "cluster", func(tr tree, _ *Node, _ *Daemon) { apiServer(t, tr, "csinodes/node-1") }, Error, "the CSINode of node node-1 can be read", "docs/front.md"},
		{"another name", "cluster", func(tr tree, n *Node, _ *Daemon) {
			apiServer(t, tr, "pods")
			n.Config.Cluster.NodeName = "node-2"
		}, Error, `is "node-2" this node's name`, "kubectl get nodes"},
		{"the daemon is kept off", "cluster", func(tr tree, _ *Node, d *Daemon) {
			apiServer(t, tr, "nothing")
			d.Node.Findings = []string{"pods cannot be looked up: the API server x cannot be reached: i/o timeout"}
		}, Error, "systemd's IP filter", "cluster.conf"},
	}
	for _, c := range cases {
		t.Run(c.name, func(t *testing.T) {
			tr := newTree(t)
			node, daemon := tr.node, healthyDaemon()
			node.Config.Cluster.Kubeconfig, node.Config.Cluster.NodeName = "/etc/kubernetes/kubelet.conf", "node-1"
			c.spoil(tr, &node, &daemon)
			assertFinding(t, findingsOf(t, c.check, node, daemon), c)
		})
	}
}
