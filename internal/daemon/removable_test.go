package daemon

import (
	"encoding/json"
	"errors"
	"fmt"
	"net/http"
	"net/http/httptest"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/prometheus/client_golang/prometheus/promhttp"
	"go.uber.org/zap"
	"go.uber.org/zap/zapcore"
	"go.uber.org/zap/zaptest/observer"

	"github.com/crust-proxy/crust-proxy/internal/daemon/config"
	"github.com/crust-proxy/crust-proxy/internal/front/csi/staging"
	"github.com/crust-proxy/crust-proxy/internal/ground/telemetry"
	"github.com/crust-proxy/crust-proxy/pkg/deferral"
	"github.com/crust-proxy/crust-proxy/pkg/volume"
	"github.com/crust-proxy/crust-proxy/test/check"
)

// stateWith writes records of volumes, each "driver/pod"; a driver with a star published through the Runtime API by
// itself. The device of a pod that is called held was released by force.
func stateWith(t *testing.T, volumes ...string) (runDir string) {
	t.Helper()
	runDir = t.TempDir()
	state := filepath.Join(runDir, "state")
	check.Must(t, errors.Join(os.MkdirAll(state+"/volumes", 0o700), os.Mkdir(state+"/held", 0o700)))
	boot := check.Value(os.ReadFile("/proc/sys/kernel/random/boot_id"))(t)
	for _, one := range volumes {
		driver, pod, _ := strings.Cut(one, "/")
		target := "/k/pods/" + pod + "/mount"
		v := volume.Volume{
			Key: volume.KeyOf(target), Target: target, ResolvedTarget: target, Driver: strings.TrimSuffix(driver, "*"), Handler: "kata",
			Device: volume.Device{Kind: volume.BlockDevice},
		}
		if !strings.HasSuffix(driver, "*") {
			v.Origin = &volume.Origin{VolumeID: pod, PodNamespace: "ns", PodName: "name-of-" + pod}
		}
		raw := check.Value(json.Marshal(struct {
			Version int    `json:"version"`
			Boot    string `json:"boot"`
			volume.Volume
			Held volume.Volume `json:"volume"`
		}{1, strings.TrimSpace(string(boot)), v, v}))(t)
		check.Must(t, os.WriteFile(filepath.Join(state, map[bool]string{false: "volumes", true: "held"}[pod == "held"], string(v.Key)+".json"), raw, 0o600))
	}
	return runDir
}

// rootWith makes a kubelet root in whose registry our sockets for these drivers are.
func rootWith(t *testing.T, drivers ...string) (root, registry string) {
	t.Helper()
	root = t.TempDir()
	registry = filepath.Join(root, "plugins_registry")
	check.Must(t, os.Mkdir(registry, 0o700))
	for _, driver := range drivers {
		check.StaleSocket(t, filepath.Join(registry, driver+".crust-proxy-reg.sock"))
	}
	return root, registry
}

func TestRemovable(t *testing.T) {
	file := filepath.Join(t.TempDir(), "left.yaml")
	check.Must(t, os.WriteFile(file, []byte("front: {enabled: true, abandonVolumes: true}"), 0o600))
	root, _ := rootWith(t, "ebs")
	behind := []string{"--kubelet-root", root}
	var many []string
	for i := range mostNamed + 3 {
		many = append(many, fmt.Sprintf("lvm/p%02d", i))
	}
	for name, c := range map[string]struct {
		volumes []string
		args    []string
		code    int
		says    []string
		not     string
	}{
		"nothing":           {nil, nil, exitOK, []string{"No deferred volume"}, ""},
		"one":               {[]string{"lvm/p1"}, nil, exitError, []string{"1 deferred", "/k/pods/p1/mount (driver lvm, handler kata, pod ns/name-of-p1)", "--abandon-volumes"}, ""},
		"of the API itself": {[]string{"lvm*/p1"}, nil, exitError, []string{"/k/pods/p1/mount (driver lvm, handler kata)"}, ""},
		"released by force": {[]string{"lvm/held"}, nil, exitError, []string{"1 deferred", "/k/pods/held/mount", "released by force while it was open"}, ""},
		"held, of another":  {[]string{"lvm/held"}, []string{"ebs"}, exitOK, []string{"No deferred volume of ebs lives", "ebs is not behind the front now"}, ""},
		"a driver":          {[]string{"lvm/p1", "ebs/p2"}, []string{"ebs"}, exitError, []string{"1 deferred", "p2"}, "p1"},
		"two drivers":       {[]string{"lvm/p1", "ebs/p2"}, []string{"ebs", "lvm"}, exitError, []string{"2 deferred"}, ""},
		"a driver that has none behind the front": {[]string{"lvm*/p1"}, []string{"lvm"}, exitOK, []string{"No deferred volume"}, "p1"},
		"insisted":                    {[]string{"lvm/p1"}, []string{"--abandon-volumes"}, exitOK, []string{"warning", "/k/pods/p1/mount", "no data is lost"}, ""},
		"the key of an earlier start": {[]string{"lvm/p1"}, []string{"--config", file}, exitError, []string{"1 deferred", "--abandon-volumes"}, ""},
		"many":                        {many, nil, exitError, []string{"23 deferred", "and 3 more"}, "p22"},
		"a driver behind":             {nil, behind, exitError, []string{"1 CSI driver(s) are behind the front: ebs", "crust-proxy withdraw", "--abandon-volumes"}, "pods"},
		"a driver to be moved back":   {nil, append(behind, "ebs"), exitOK, []string{"No deferred volume of ebs"}, "behind"},
		"insisted, a driver behind":   {nil, append(behind, "--abandon-volumes"), exitOK, []string{"warning", "ebs"}, ""},
	} {
		t.Run(name, func(t *testing.T) {
			run := stateWith(t, c.volumes...)
			code, said := askMain(t, append([]string{"removable", "--run-dir", run, "--kubelet-root", run}, c.args...)...)
			check.Equal(t, code, c.code, "%s", said)
			check.Says(t, "it", said, c.says...)
			check.That(t, c.not == "" || !strings.Contains(said, c.not), "it says %q: %s", c.not, said)
		})
	}
}

// TestUnreadableRecordsCountAsVolumes: what cannot be read may be a volume.
func TestUnreadableRecordsCountAsVolumes(t *testing.T) {
	run := stateWith(t)
	for i := range mostNamed + 3 {
		check.Must(t, os.WriteFile(fmt.Sprintf("%s/state/volumes/x%02d.json", run, i), []byte("{"), 0o600))
	}
	code, said := askMain(t, "removable", "--run-dir", run)
	check.That(t, code == exitError && !strings.Contains(said, "x20"), "%d: %s", code, said)
	check.Says(t, "it", said, "may live", "x19.json", "and 3 more")
	denied := living{unsure: fmt.Errorf("a record: %w", os.ErrPermission)}
	check.Says(t, "it", denied.refusal("--abandon-volumes", 1), "as root")
	check.Says(t, "it", denied.refusal("--abandon-volumes", 0), "--abandon-volumes") // as with an LSM
}

// driverWasHere makes what is left of a driver that was behind the front since the boot.
func driverWasHere(t *testing.T, s *settings) {
	t.Helper()
	check.Must(t, os.MkdirAll(s.get().CSISockets(), 0o700))
	check.StaleSocket(t, filepath.Join(s.get().CSISockets(), "ebs.sock"))
}

// TestFrontStaysOverABoot, and a restart, when the file that had it on loses it: drivers may be behind it. The
// configuration that was accepted last is used instead.
func TestFrontStaysOverABoot(t *testing.T) {
	const on, off, insisted = "front: {enabled: true}\n", "front: {enabled: false}\n", "front: {abandonVolumes: true}\n"
	ebs, lvm := []string{"ebs"}, []string{"lvm/p1"}
	for name, c := range map[string]struct {
		accepted, file   string
		booted           bool
		drivers, volumes []string
		stays            string
	}{
		"a boot":                 {on, "", true, ebs, nil, "behind the front: ebs"},
		"a boot, shut down":      {on, off, true, nil, nil, "has listed none for ten minutes"},
		"a restart":              {on, off, false, ebs, nil, "behind the front: ebs"},
		"the rest of a file":     {on, "", false, ebs, nil, "(the default)"},
		"volumes":                {on, off, false, nil, lvm, "front.abandonVolumes: true"},
		"nothing is behind":      {on, off, false, nil, []string{"lvm*/p1"}, ""},
		"insisted":               {on, insisted, true, ebs, lvm, ""},
		"never on":               {off, "", true, ebs, nil, ""},
		"nothing accepted":       {"", off, true, ebs, nil, ""},
		"none, but with volumes": {"", off, true, nil, lvm, "/k/pods/p1/mount"},
		"the accepted is bad":    {on + "gone: 1", off, true, ebs, nil, ""},
	} {
		n, run := newNode(t, c.file), stateWith(t, c.volumes...)
		root, registry := rootWith(t, c.drivers...)
		check.Must(t, os.MkdirAll(filepath.Dir(n.accepted), 0o700))
		if c.accepted != "" {
			check.Must(t, os.WriteFile(n.accepted, []byte(c.accepted), 0o600))
		}
		s := check.Value(n.load("--accepted", n.accepted, "--run-dir", run, "--kubelet-root", root))(t)
		if !c.booted {
			driverWasHere(t, s)
		}
		err := leaveFront(s.flags, s.get(), zap.NewNop())
		left := check.Value(os.ReadDir(registry))(t)
		check.That(t, (err == nil) == (c.stays == "") && (err == nil || strings.Contains(err.Error(), c.stays)), "%s: %v", name, err)
		check.That(t, err == nil && len(left) == 0 || err != nil && len(left) == len(c.drivers), "%s: the registrations are %v", name, left)
		cfg, failed := s.fallBack(err)
		check.That(t, err == nil || c.accepted == "" || failed == nil && cfg.Front.Enabled, "%s: it starts with %+v, %v", name, cfg.Front, failed)
		if err == nil || c.accepted == "" {
			continue
		}
		s.put(&cfg)
		s.apply = func(*config.Config) {}
		check.Must(t, os.RemoveAll(filepath.Join(run, "state")))
		check.Must(t, os.RemoveAll(registry))
		check.Must(t, os.MkdirAll(s.get().CSISockets(), 0o700)) // as prepareFront does
		s.reload()
		check.That(t, (s.file().bad == nil) == !c.booted, "%s: just restarted, all gone: %v", name, s.file().bad)
		before := time.Now().Add(-11 * time.Minute)
		check.Must(t, os.Chtimes(s.get().CSISockets(), before, before))
		s.reload()
		check.That(t, s.file().bad == nil, "%s: later: %v", name, s.file().bad)
	}
}

// TestUnreadableRecordsDoNotPreventTheStart, nor do held devices, whether the front was ever on or not; a
// volume that is known to have come through it does.
func TestUnreadableRecordsDoNotPreventTheStart(t *testing.T) {
	for _, c := range []struct {
		file, content, volume string
		ok                    bool
	}{
		{file: "volumes/" + string(volume.KeyOf("/k/a")) + ".json", content: `{"version":1,`, ok: true},
		{file: "volumes/" + string(volume.KeyOf("/k/a")) + ".json", content: `{"version":2}`, ok: true},
		{file: "volumes/stray", content: "hello", volume: "lvm*/p1 lvm/held", ok: true},
		{file: "csi/damaged.json", content: "{", ok: true},
		{file: "volumes/stray", content: "hello", volume: "lvm/p1"},
	} {
		cfg := config.Default()
		cfg.RunDir, cfg.Front.KubeletRegistry = stateWith(t, strings.Fields(c.volume)...), t.TempDir()
		path := filepath.Join(cfg.StateDir(), c.file)
		check.Must(t, errors.Join(os.MkdirAll(filepath.Dir(path), 0o700), os.WriteFile(path, []byte(c.content), 0o600)))
		core, logs := observer.New(zapcore.DebugLevel)
		n := newNode(t, "")
		err := leaveFront(check.Value(n.load())(t).flags, &cfg, zap.New(core))
		check.That(t, (err == nil) == c.ok, "%s with %q: %v", c.file, c.volume, err)
		told := logs.FilterLevelExact(zapcore.WarnLevel).All()
		check.That(t, !c.ok || len(told) == 1 && strings.Contains(told[0].Message, filepath.Base(c.file)), "%s: told %+v", c.file, told)
	}
}

// TestNoMoveUnderVolumes: with other directories they would be lost. The daemon of another kubelet has none of both. A
// move back from the wrong ones finds the volumes again.
func TestNoMoveUnderVolumes(t *testing.T) {
	run, root := stateWith(t, "lvm*/p1"), "/k"
	dirs := strings.NewReplacer("RUN", run, "ROOT", root, "ON", "front: {enabled: true")
	for moved, stays := range map[string]bool{
		"ON}, runDir: /run/b, kubeletRoot: ROOT": true, "ON}, runDir: RUN, kubeletRoot: /b": true, "ON}, runDir: /run/b, kubeletRoot: /b": false,
		"ON}, runDir: RUN, kubeletRoot: ROOT": false, "ON, abandonVolumes: true}, runDir: /run/b, kubeletRoot: ROOT": false,
		"ON}, runDir: RUN, kubeletRoot: /dev/null": true, // where guards cannot be listed
	} {
		for _, accepted := range []string{"", "RUN, kubeletRoot: ROOT", "/run/empty, kubeletRoot: ROOT", "RUN, kubeletRoot: /wrong", "/run/empty, kubeletRoot: /dev/null"} {
			n := newNode(t, "")
			if accepted != "" {
				n.write(dirs.Replace("{runDir: " + accepted + "}"))
				n.start()
			}
			running := check.Value(n.load())(t)
			n.write(dirs.Replace("{" + moved + "}"))
			s := check.Value(n.load("--accepted", n.accepted))(t)
			err, stays := leaveFront(s.flags, s.get(), zap.NewNop()), stays && accepted == "RUN, kubeletRoot: ROOT"
			check.That(t, (err != nil) == stays && (err == nil || strings.Contains(err.Error(), "/k/pods/p1/mount")), "%s after %q: %v", moved, accepted, err)
			running.reload()
			check.That(t, (running.file().bad != nil) == stays, "%s is reloaded after %q: %v", moved, accepted, running.file().bad)
		}
	}
}

// nodeWith serves the metrics of a daemon with these volumes.
func nodeWith(t *testing.T, volumes ...telemetry.VolumeCount) (address string) {
	t.Helper()
	return nodeIn(t, telemetry.NodeState{Volumes: volumes})
}

func nodeIn(t *testing.T, state telemetry.NodeState) (address string) {
	t.Helper()
	metrics := telemetry.NewMetrics("test")
	metrics.WatchNode(func() telemetry.NodeState { return state })
	return served(t, promhttp.HandlerFor(metrics.Registry, promhttp.HandlerOpts{}))
}

func served(t *testing.T, handler http.Handler) string {
	t.Helper()
	server := httptest.NewServer(handler)
	t.Cleanup(server.Close)
	return strings.TrimPrefix(server.URL, "http://")
}

// nodeWithStaged serves the metrics of a daemon whose front has a device staged of each of these CSI volumes.
func nodeWithStaged(t *testing.T, badFront error, published []deferral.Status, ids ...string) (address string) {
	t.Helper()
	var staged []staging.Staged
	for _, id := range ids {
		staged = append(staged, staging.Staged{Driver: "ebs.csi.aws.com", VolumeID: id, Path: "/k/staging"})
	}
	onRecord := &volumes{badFront: badFront, staged: func() []staging.Staged { return staged }}
	return nodeIn(t, telemetry.NodeState{Staged: onRecord.stagedOnly(slices.Values(published))})
}

func askMain(t *testing.T, args ...string) (code int, said string) {
	t.Helper()
	var out, complaints strings.Builder
	code = Main(args, &out, &complaints)
	return code, out.String() + complaints.String()
}

func TestNodesAreAskedWhetherVolumesLive(t *testing.T) {
	published := []deferral.Status{{Volume: &volume.Volume{Driver: "ebs.csi.aws.com", Origin: &volume.Origin{VolumeID: "vol-1"}}}}
	kept := telemetry.VolumeCount{State: "bound", Driver: "ebs.csi.aws.com", Handler: "kata", Count: 2}
	for address, want := range map[string][]string{
		nodeWith(t): {"0", "No deferred volume lives on any of 1 nodes", "has no address was not asked"},
		nodeIn(t, telemetry.NodeState{Drivers: map[string]bool{"": false}}):                            {"0", "no driver is behind the front"},
		nodeIn(t, telemetry.NodeState{Drivers: map[string]bool{"": false, "lvm": true, "ebs": false}}): {"1", "2 CSI driver(s) are behind the front there: ebs, lvm", "move the drivers back"},
		nodeWith(t, telemetry.VolumeCount{State: "adopted", Driver: "x", Handler: "kata", Count: 1}):   {"0", "any of 1 nodes"},
		nodeWith(t, telemetry.VolumeCount{State: "refused", Driver: "x", Count: 4}):                    {"0", "any of 1 nodes"},
		nodeWith(t, kept, telemetry.VolumeCount{State: "removing", Driver: "b", Handler: "kata", Count: 1}): {
			"1", "node 127.0.0.1: 3 deferred volume(s) live there, of driver b, ebs.csi.aws.com", "crustctl list",
		},
		nodeIn(t, telemetry.NodeState{BadRecords: 2}):          {"1", "node 127.0.0.1: 2 record(s) there cannot be used"},
		nodeWithStaged(t, nil, published, "vol-1"):             {"0", "any of 1 nodes"}, // counted as a volume
		nodeWithStaged(t, nil, published, "vol-1", "vol-2"):    {"1", "node 127.0.0.1: 1 deferred volume(s) live there, of driver ebs.csi.aws.com", "crust-proxy removable"},
		nodeWithStaged(t, errors.New("a damaged record"), nil): {"1", "node 127.0.0.1: 1 deferred volume(s) live there, of driver unknown"},
		"127.0.0.1:1":                     {"1", "node 127.0.0.1: its crust-proxy cannot be asked"},
		served(t, http.NotFoundHandler()): {"1", "the answer is 404"},
		served(t, http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) { _, _ = fmt.Fprintln(w, "up 1") })):   {"1", "is no crust-proxy"},
		served(t, http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) { _, _ = fmt.Fprintln(w, "<html>") })): {"1", "cannot be read"},
		"127.0.0.1":               {"1", "is not host:port"},
		"no-such-host.invalid:80": {"1", "no node can be asked"},
	} {
		code, said := askMain(t, "removable-nodes", address)
		check.Says(t, address, said, want[1:]...)
		check.That(t, fmt.Sprint(code) == want[0], "%s: the exit code is %d, want %s", address, code, want[0])
	}
}

func TestARefusalNamesTheWayBack(t *testing.T) {
	repair := "helm rollback crust-proxy 3 --namespace=ns"
	kept := nodeWith(t, telemetry.VolumeCount{State: "bound", Driver: "d", Handler: "kata", Count: 1})
	for _, address := range []string{kept, "no-such-host.invalid:80"} {
		code, said := askMain(t, "removable-nodes", address, repair)
		check.That(t, code == 1 && strings.Contains(said, "\n  "+repair+"\n"), "%s: %d, %s", address, code, said)
	}
	code, said := askMain(t, "removable-nodes", nodeWith(t), repair)
	check.That(t, code == 0 && !strings.Contains(said, repair), "without volumes: %d, %s", code, said)
	own := nodeIn(t, telemetry.NodeState{Drivers: map[string]bool{"own": true}})
	code, said = askMain(t, "removable-nodes", own, repair, "own")
	check.That(t, code == 0, "with the release's own driver: %d, %s", code, said)
	code, said = askMain(t, "removable-nodes", own, repair, "other")
	check.That(t, code == 1 && strings.Contains(said, "there: own"), "with a driver of others: %d, %s", code, said)
}
