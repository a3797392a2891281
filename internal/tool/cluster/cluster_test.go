package cluster

import (
	"bytes"
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"maps"
	"net/http"
	"net/http/httptest"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	"google.golang.org/protobuf/encoding/protojson"
	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/types/known/timestamppb"

	"github.com/crust-proxy/crust-proxy/internal/tool/command"
	"github.com/crust-proxy/crust-proxy/internal/tool/printer"
	adminv1 "github.com/crust-proxy/crust-proxy/proto/crust/admin/v1"
	"github.com/crust-proxy/crust-proxy/test/check"
)

// fake is an API server that knows pods and what their ports serve.
type fake struct {
	t          *testing.T
	mux        *http.ServeMux
	server     *httptest.Server
	kubeconfig string
	pods       []object
	podsToo    any // in annotations and environment of pods that are added
	message    string
	view       *adminv1.NodeView // of all nodes, if it is set
	volumes    []object
	atOnce     atomic.Int32
	mostAtOnce atomic.Int32
}

func newFake(t *testing.T) *fake {
	t.Helper()
	f := &fake{t: t, mux: http.NewServeMux(), kubeconfig: filepath.Join(t.TempDir(), "kubeconfig")}
	f.server = httptest.NewServer(f.mux)
	t.Cleanup(f.server.Close)
	check.Must(t, os.WriteFile(f.kubeconfig, fmt.Appendf(nil, `{apiVersion: v1, kind: Config, current-context: a,
clusters: [{name: a, cluster: {server: %q}}], users: [{name: a}], contexts: [{name: a, context: {cluster: a, user: a}}]}`, f.server.URL), 0o600))
	f.mux.HandleFunc("GET /api/v1/pods", func(w http.ResponseWriter, req *http.Request) {
		from := 0
		_, _ = fmt.Sscan(req.URL.Query().Get("continue"), &from)
		to, next := min(from+500, len(f.pods)), ""
		if to < len(f.pods) {
			next = fmt.Sprint(to)
		}
		f.answer(w, map[string]any{"metadata": map[string]any{"continue": next}, "items": f.pods[from:to]})
	})
	return f
}

func (f *fake) answer(w http.ResponseWriter, value any) {
	w.Header().Set("Content-Type", "application/json")
	if message, is := value.(proto.Message); is {
		_, _ = w.Write(check.Value(protojson.Marshal(message))(f.t))
		return
	}
	check.Must(f.t, json.NewEncoder(w).Encode(value))
}

// pod adds a pod of a daemon on a node; without a phase it runs.
func (f *fake) pod(node, phase string) string {
	f.pods = append(f.pods, object{
		"metadata": object{"name": "crust-" + node, "namespace": "system", "annotations": f.podsToo,
			"ownerReferences": []object{{"kind": "DaemonSet", "controller": true}}},
		"spec": object{
			"nodeName": node, "volumes": f.volumes,
			"containers": []object{{"name": "crust-proxy", "env": f.podsToo, "ports": []object{{"name": "http", "containerPort": 99}}, "securityContext": object{"privileged": true}}},
		},
		"status": object{"phase": phase, "message": f.message, "podIP": map[string]string{"Running": "10.0.0.1"}[phase]},
	})
	return "GET /api/v1/namespaces/system/pods/crust-" + node + ":99/proxy"
}

func (f *fake) metadata(pod int) object {
	found, _ := f.pods[pod]["metadata"].(object)
	return found
}

func (f *fake) node(name string, view *adminv1.NodeView, volumes ...*adminv1.Volume) {
	base := f.pod(name, "Running")
	f.mux.HandleFunc(base+"/v1/node", func(w http.ResponseWriter, _ *http.Request) {
		now := f.atOnce.Add(1)
		defer f.atOnce.Add(-1)
		for most := f.mostAtOnce.Load(); now > most && !f.mostAtOnce.CompareAndSwap(most, now); most = f.mostAtOnce.Load() {
		}
		f.answer(w, cmp.Or(f.view, view))
	})
	f.mux.HandleFunc(base+"/v1/volumes", func(w http.ResponseWriter, req *http.Request) {
		found := slices.DeleteFunc(slices.Clone(volumes), func(v *adminv1.Volume) bool {
			driver := req.URL.Query().Get("driver")
			return driver != "" && v.GetDriver() != driver
		})
		if len(found) > 1 && req.URL.Query().Get("page_token") == "" { // page by page
			f.answer(w, &adminv1.ListVolumesResponse{Volumes: found[:1], NextPageToken: "1\x00"})
			return
		} else if len(found) > 1 {
			found = found[1:]
		}
		f.answer(w, &adminv1.ListVolumesResponse{Volumes: found})
	})
}

var testNow = time.Date(2026, 11, 21, 12, 0, 0, 0, time.UTC)

func healthy() *adminv1.NodeView {
	return &adminv1.NodeView{
		Node: &adminv1.GetNodeResponse{
			Version: "v1.2.3", Proof: "count", StartedAt: timestamppb.New(testNow.Add(-26 * time.Hour)), ConfigDigest: strings.Repeat("ab", 32),
			VolumesByState: map[string]int64{"bound": 2, "published": 1},
		},
		Handlers: &adminv1.ListHandlersResponse{Handlers: []*adminv1.Handler{{Name: "crust", Healthy: true, Volumes: 3, Bound: 2}}},
		Drivers:  &adminv1.ListDriversResponse{FrontEnabled: true, Drivers: []*adminv1.Driver{{Name: "lvm", Version: "v2", Ready: true}}},
	}
}

func sick() *adminv1.NodeView {
	view := healthy()
	view.Node.Version, view.Node.ConfigDigest = "v1.1.0", strings.Repeat("cd", 32)
	view.Node.ConfigBadSince = timestamppb.New(testNow.Add(-time.Hour))
	view.Node.VolumesByState["degraded"] = 1
	view.Node.Findings = []string{"the configuration file is bad\x1b[2J"}
	view.Drivers.Drivers[0].Ready, view.Drivers.Drivers[0].Problem = false, "its socket does not answer"
	return view
}

// run runs the plug-in, and returns what it prints, with the exit code.
func (f *fake) run(args ...string) string {
	f.t.Helper()
	var out, errs bytes.Buffer
	args = append(args, "--kubeconfig="+f.kubeconfig)
	code := run(f.t.Context(), args, &printer.Printer{Out: &out}, &errs)
	return fmt.Sprintf("%s%sexit %d\n", strings.ReplaceAll(out.String(), f.server.URL, "API"), errs.String(), code)
}

func (f *fake) wants(got string, words ...string) {
	f.t.Helper()
	check.Says(f.t, "the answer", got, words...)
}

func TestNodes(t *testing.T) {
	f := newFake(t)
	f.node("node-b", sick())
	f.node("node-a", healthy())
	f.pod("node-c", "Pending")
	f.mux.HandleFunc(f.pod("node-d", "Running")+"/v1/node", func(_ http.ResponseWriter, req *http.Request) { <-req.Context().Done() })
	f.pod("node-e", "Running") // of an older version
	f.mux.HandleFunc(f.pod("node-f", "Running")+"/v1/node", func(w http.ResponseWriter, _ *http.Request) {
		f.refuse(w, http.StatusNotFound, "NotFound", `"details": {"kind": "pods"}`)
	})
	evil := newFake(t)
	evil.mux.HandleFunc("GET /", func(http.ResponseWriter, *http.Request) { t.Error("a daemon's redirection is followed") })
	f.mux.HandleFunc(f.pod("node-g", "Running")+"/v1/node", func(w http.ResponseWriter, req *http.Request) {
		http.Redirect(w, req, evil.server.URL, http.StatusFound)
	})
	f.pod("node-h", "Running") // of somebody, with our label
	delete(f.metadata(len(f.pods)-1), "ownerReferences")
	f.pod("node-j", "Running") // of a DaemonSet of somebody
	f.pods[len(f.pods)-1]["spec"] = object{"nodeName": "node-j", "containers": []object{{"name": "crust-proxy"}}}
	f.mux.HandleFunc(f.pod("node-i", "Running")+"/v1/node", func(w http.ResponseWriter, _ *http.Request) {
		f.refuse(w, http.StatusForbidden, "Forbidden", `"message": "cannot get resource pods/proxy"`)
	})
	got := f.run("nodes", "--request-timeout=5s")
	lines := strings.Split(got, "\n")
	for i, want := range []string{
		"NODE VERSION VOLUMES BOUND DEGRADED REFUSED HELD DRIVERS FINDINGS CONFIG",
		"node-a v1.2.3 3 2 0 0 0 1/1 0 ok",
		"node-b v1.1.0 4 2 1 0 0 0/1 1 error, 1 warn bad for",
		"node-c - - - - - - - - no answer: pod crust-node-c does not run: Pending",
		"node-d - - - - - - - - no answer: ",
		"node-e - - - - - - - - no answer: there is no view of it: http.view is off",
		"node-f - - - - - - - - no answer: it has gone meanwhile",
		"node-g - - - - - - - - no answer: ",
		"node-i - - - - - - - - no answer: you may not ask it: cannot get resource pods/proxy",
		"exit 3",
	} {
		is := strings.Join(strings.Fields(lines[i]), " ")
		check.That(t, strings.HasPrefix(is, want), "line %d is %q, not %q", i, is, want)
	}
	f.wants(f.run("nodes", "--node=node-a", "-o", "wide"), "abababababab", "system/crust-node-a", "exit 0\n")
	f.wants(f.run("nodes", "--node=node-a,node-z"), "v1.2.3", "no answer: no crust-proxy is known there", "exit 3\n")
	got = f.run("check", "--node=node-i")
	check.That(t, strings.Contains(got, "do: have yourself given the right to get pods/proxy, or nodes/proxy") && !strings.Contains(got, "describe and logs"), "it is called down:\n%s", got)
	f.wants(f.run("nodes", "-o", "json", "--request-timeout=5s"), `"configDigest": "abab`, `"error": "pod crust-node-c does not run: Pending"`, `"check": "drivers"`)
}

// TestManyNodes are asked in parallel, and not all at once.
func TestManyNodes(t *testing.T) {
	f := newFake(t)
	for i := range 700 {
		f.node(fmt.Sprintf("node-%03d", i), healthy())
	}
	got := f.run("nodes")
	lines := strings.Count(got, "v1.2.3")
	check.That(t, lines == 700 && f.mostAtOnce.Load() <= askedAtOnce && f.mostAtOnce.Load() >= 2, "%d lines, %d at once", lines, f.mostAtOnce.Load())
}

func volumes() []*adminv1.Volume {
	return []*adminv1.Volume{
		{Id: strings.Repeat("a", 64), TargetPath: "/var/lib/kubelet/pods/u/volumes/kubernetes.io~csi/pvc-7/mount", State: adminv1.VolumeState_VOLUME_STATE_BOUND,
			Driver: "lvm", Handler: "crust", PodNamespace: "shop", PodName: "web-1", VolumeId: "vol-1",
			Usage: []*adminv1.VolumeUsage{{Unit: adminv1.VolumeUsage_UNIT_BYTES, Total: 2 << 30, Used: 1 << 30}}},
		{Id: strings.Repeat("b", 64), TargetPath: "/elsewhere", State: adminv1.VolumeState_VOLUME_STATE_REFUSED, Driver: "ebs", PodNamespace: "bank", PodName: "db-0", VolumeId: "vol-2"},
	}
}

func TestVolumes(t *testing.T) {
	f := newFake(t)
	f.node("node-a", healthy(), volumes()...)
	f.pod("node-b", "Pending")
	got := f.run("volumes")
	f.wants(strings.Join(strings.Fields(got), " "), "node-a BOUND shop/web-1 pvc-7 lvm crust 1GiB 2GiB -",
		"node-a REFUSED bank/db-0 vol-2 ebs - - - -", "node-b no answer: pod crust-node-b", "exit 3")
	for _, args := range [][]string{{"--namespace=shop"}, {"--driver=lvm"}} {
		got = f.run(append(args, "volumes", "--node=node-a")...)
		check.That(t, !strings.Contains(got, "bank") && strings.Contains(got, "shop") && strings.HasSuffix(got, "exit 0\n"), "%v:\n%s", args, got)
	}
}

// TestVolumesThatAreBad: a wrong state is wrong usage, a degraded volume is a finding, and a daemon that has always one
// page more is not read for ever.
func TestVolumesThatAreBad(t *testing.T) {
	f := newFake(t)
	worst := volumes()[0]
	worst.State = adminv1.VolumeState_VOLUME_STATE_DEGRADED
	f.node("node-a", healthy(), worst)
	f.wants(f.run("volumes"), "DEGRADED", "exit 3\n")
	for _, state := range []string{"bogus", "bound,held"} {
		f.wants(f.run("volumes", "--state", state), "is none of ", "degraded", "exit 2\n")
	}
	worst.State, worst.ReleasedByForce = adminv1.VolumeState_VOLUME_STATE_HELD, true
	f.wants(f.run("volumes"), "HELD", "exit 3\n")
	forced := healthy()
	forced.Node.VolumesByState["held"], forced.Node.VolumesReleasedByForce = 2, 1
	f.view = forced
	f.wants(f.run("nodes"), "exit 3\n")
	f.wants(f.run("check"), "fail volumes                5 volumes, 2 bound, 2 held, 1 published (1 released by force)", "exit 3\n")
	pages, page := 0, &adminv1.ListVolumesResponse{Volumes: []*adminv1.Volume{{LastError: strings.Repeat("a", mostAnswer/3)}}}
	f.mux.HandleFunc(f.pod("node-b", "Running")+"/v1/volumes", func(w http.ResponseWriter, _ *http.Request) {
		pages++
		page.NextPageToken = fmt.Sprint(pages)
		f.answer(w, page)
	})
	f.wants(f.run("volumes", "--node=node-b"), "its volumes have more than", "exit 3\n")
	check.That(t, pages == 3, "%d pages were read", pages)
}

// TestWithoutAnAPIServer asks the addresses of a service.
func TestWithoutAnAPIServer(t *testing.T) {
	f := newFake(t)
	f.mux.HandleFunc("GET /v1/node", func(w http.ResponseWriter, _ *http.Request) {
		view := healthy()
		view.Node.NodeName = "node-7"
		f.answer(w, view)
	})
	f.wants(f.run("nodes", strings.TrimPrefix(f.server.URL, "http://")), "127.0.0.1", "v1.2.3", "exit 0\n")
	f.wants(f.run("nodes", "127.0.0.1:1"), "127.0.0.1", "no answer", "refused", "exit 3\n")
	f.wants(f.run("nodes", "here"), `"here" is not host:port`, "exit 1\n")
	f.wants(f.run("nodes", "127.0.0.1:1", "--node=node-7"), "--node is for the API server", "exit 2\n")
	other := newFake(t)
	other.mux.HandleFunc("GET /", func(w http.ResponseWriter, req *http.Request) {
		http.Redirect(w, req, f.server.URL+req.URL.Path, http.StatusFound)
	})
	f.wants(f.run("nodes", strings.TrimPrefix(other.server.URL, "http://")), "no answer: the answer is 302 Found", "exit 3\n")
}

func TestCheck(t *testing.T) {
	f := newFake(t)
	f.node("node-a", healthy())
	f.mux.HandleFunc("GET /version", func(w http.ResponseWriter, _ *http.Request) { f.answer(w, map[string]string{"gitVersion": "v1.37.0"}) })
	ready := 1
	f.mux.HandleFunc("GET /apis/apps/v1/daemonsets", func(w http.ResponseWriter, _ *http.Request) {
		f.answer(w, map[string]any{"items": []any{map[string]any{"metadata": map[string]any{"name": "crust", "namespace": "system"},
			"status": map[string]any{"desiredNumberScheduled": 1, "numberReady": ready, "updatedNumberScheduled": 1}},
			map[string]any{"metadata": map[string]any{"name": "x", "namespace": "evil"}, "status": map[string]any{"desiredNumberScheduled": 3}}}})
	})
	got := f.run("check")
	f.wants(got, "ok   cluster                Kubernetes v1.37.0", "ok   installation           DaemonSet system/crust: 1 of 1 pods ready",
		"warn versions               v1.2.3 on 1 node of crust-proxy; this program is", "ok   configuration          abababababab on 1 node in force",
		"ok   driver lvm             works on 1 node", "ok   handler crust ", "ok   volumes                3 volumes, 2 bound, 1 published", "ok   findings ", "exit 0\n")
	for problem, is := range map[string]*adminv1.Driver{
		"not in the CSINode": {Problem: "not in the CSINode"}, "refused: no": {KubeletStatus: "refused: no"}, "directly": {DirectlyRegistered: true},
	} {
		is.Name, is.Ready = "lvm", true
		f.view = &adminv1.NodeView{Node: healthy().Node, Handlers: healthy().Handlers, Drivers: &adminv1.ListDriversResponse{Drivers: []*adminv1.Driver{is}}}
		f.wants(f.run("check"), "fail driver lvm             works on 0 nodes, not on node-a: ", problem, "exit 3\n")
	}
	f.view = healthy()
	f.view.Drivers.Drivers = append(f.view.Drivers.Drivers, &adminv1.Driver{Name: "lvm", Problem: "registered already"}, &adminv1.Driver{Problem: "refused"})
	f.wants(f.run("check"), "ok   driver lvm             works on 1 node", "warn findings               node-a: a registrar has not said its driver's name",
		"warn findings               node-a: driver lvm is served, and a second registrar is not taken", "exit 0\n")
	f.view = healthy()
	for i := range 30 {
		f.view.Node.Findings = append(f.view.Node.Findings, fmt.Sprintf("sick since 2026-01-01T00:00:%02dZ", i), fmt.Sprint("odd ", i))
	}
	got = f.run("check")
	f.wants(got, "and 11 more")
	check.That(t, strings.Count(got, "sick since") <= 1 && strings.Count(got, "\nwarn findings ") == 21, "findings flood:\n%s", got)
	f.view = nil
	ready = 0
	ill := sick()
	ill.Node.Errors = ill.Node.Findings
	f.node("node-b", ill)
	f.pod("node-c", "Pending")
	got = f.run("check")
	f.wants(got, "fail installation ", "fail daemons                node node-c does not answer: pod crust-node-c does not run", "v1.1.0 on 1 node (node-b); v1.2.3 on 1 node (node-a)",
		"warn configuration ", "fail driver lvm             works on 1 node, not on node-b: its socket does not answer", "fail volumes ",
		`fail findings               node-b: the configuration file is bad\x1b[2J`, "do: ", "exit 3\n")
	f.wants(f.run("check", "-o", "json"), `"component": "daemons",`, `"result": "fail"`)
	f.mux.HandleFunc("GET /api/v1/namespaces/system/pods", func(w http.ResponseWriter, _ *http.Request) { f.answer(w, map[string]any{"items": f.pods}) })
	f.mux.HandleFunc("GET /apis/apps/v1/namespaces/system/daemonsets", func(w http.ResponseWriter, _ *http.Request) {
		f.answer(w, map[string]any{"items": []any{map[string]any{"metadata": map[string]any{"name": "own", "namespace": "system"}}}})
	})
	f.wants(f.run("check", "--system-namespace=system"), "installation           DaemonSet system/own:")
}

// trialServer adds to a fake what a trial needs. It returns the objects that are there.
func (f *fake) trialServer(onGet func()) (left func() []string) {
	objects := map[string]bool{}
	var mutex sync.Mutex
	f.mux.HandleFunc("GET /apis/storage.k8s.io/v1/storageclasses/fast", func(w http.ResponseWriter, _ *http.Request) { f.answer(w, map[string]string{"provisioner": "lvm"}) })
	handle := func(w http.ResponseWriter, req *http.Request) {
		mutex.Lock()
		defer mutex.Unlock()
		switch path := strings.TrimSuffix(req.URL.Path, "/"); {
		case req.Method == http.MethodDelete && objects[path]:
			delete(objects, path)
		case req.Method == http.MethodGet && objects[path]:
			onGet()
		case req.Method == http.MethodPost:
			var made struct{ Metadata meta }
			check.Must(f.t, json.NewDecoder(req.Body).Decode(&made))
			objects[path+"/"+made.Metadata.Name] = true
		default:
			f.refuse(w, http.StatusNotFound, "NotFound", `"details": {}`)
			return
		}
		f.answer(w, map[string]any{})
	}
	f.mux.HandleFunc("/api/v1/namespaces/", handle)
	f.mux.HandleFunc("POST /api/v1/namespaces", handle)
	return func() []string {
		mutex.Lock()
		defer mutex.Unlock()
		return slices.Collect(maps.Keys(objects))
	}
}

// refuse answers with an error of the API server, with one more field.
func (f *fake) refuse(w http.ResponseWriter, code int, reason, field string) {
	w.Header().Set("Content-Type", "application/json")
	w.WriteHeader(code)
	_, _ = fmt.Fprintf(w, `{"kind": "Status", "apiVersion": "v1", "status": "Failure", "reason": %q, "code": %d, %s}`, reason, code, field)
}

// TestTrialCleansUp: what a test has made is deleted after a step that failed, and after an interrupt.
func TestTrialCleansUp(t *testing.T) {
	for _, interrupted := range []bool{false, true} {
		f := newFake(t)
		ctx, cancel := context.WithCancel(t.Context())
		defer cancel()
		left := f.trialServer(func() {
			if interrupted {
				cancel()
			}
		})
		var out bytes.Buffer
		code := run(ctx, []string{"test", "--storage-class=fast", "--step-timeout=6s", "--kubeconfig=" + f.kubeconfig}, &printer.Printer{Out: &out}, &out)
		f.wants(out.String(), "ok   class", "ok   created", "fail written", "ok   cleaned up")
		check.That(t, code == command.ExitFindings && len(left()) == 0,
			"interrupted %v: exit code %d, left %v:\n%s", interrupted, code, left(), out.String())
	}
	f := newFake(t)
	f.wants(f.run("test"), "--storage-class", "exit 2\n")
}

// TestTrialOfADisk: the pod goes to a node that is named, growth is growth also if the driver makes more than was asked
// for, and the disk is gone, or it is said that it stays. A namespace that was there before is not removed.
func TestTrialOfADisk(t *testing.T) {
	f := newFake(t)
	policy, gets, bodies := "", 0, []string{}
	f.mux.HandleFunc("GET /api/v1/persistentvolumes/pv-1", func(w http.ResponseWriter, _ *http.Request) {
		gets++
		switch {
		case policy == "":
			w.WriteHeader(http.StatusForbidden)
		case policy == "Delete" && gets > 1:
			f.refuse(w, http.StatusNotFound, "NotFound", `"details": {}`)
		default:
			f.answer(w, object{"spec": object{"persistentVolumeReclaimPolicy": policy}, "status": object{"phase": "Released"}})
		}
	})
	size, grows := 4<<20, 2
	f.mux.HandleFunc("/api/v1/namespaces/", func(w http.ResponseWriter, req *http.Request) {
		raw := check.Value(io.ReadAll(req.Body))(t)
		switch bodies = append(bodies, string(raw)); {
		case req.Method == http.MethodDelete:
			f.refuse(w, http.StatusNotFound, "NotFound", `"details": {}`)
		case strings.HasSuffix(req.URL.Path, "/log"):
			_, _ = fmt.Fprintf(w, "written\nsize %d\n", size)
		case req.Method == http.MethodPatch:
			size *= grows
			fallthrough
		default:
			f.answer(w, object{"spec": object{"volumeName": "pv-1"}, "status": object{"capacity": object{"storage": "4Gi"}}})
		}
	})
	f.mux.HandleFunc("POST /api/v1/namespaces", func(w http.ResponseWriter, _ *http.Request) {
		f.refuse(w, http.StatusConflict, "AlreadyExists", `"details": {}`)
	})
	r := &trial{t: &tool{access: access{kubeconfig: f.kubeconfig, patience: 10 * time.Second, nodes: []string{"node-a", "node-b"}}}, name: "x", storage: "1Gi", stepTime: 10 * time.Second}
	var err error
	r.k = check.Value(r.t.connect())(t)
	_, err = r.create(t.Context())
	check.That(t, err != nil && !r.own && r.namespace == "", "a namespace that is there: %v, own %v", err, r.own)
	r.namespace, r.driver.AllowVolumeExpansion = "shop", true
	check.Value(r.create(t.Context()))(t)
	const terms = `{"nodeSelectorTerms":[{"matchFields":[{"key":"metadata.name","operator":"In","values":["node-a"]}]},{"matchFields":[{"key":"metadata.name","operator":"In","values":["node-b"]}]}]}`
	f.wants(bodies[len(bodies)-1], terms)
	grown := check.Value(r.growth(t.Context()))(t)
	f.wants(grown, "8GiB, before 4GiB")
	f.wants(strings.Join(bodies, "\n"), `"storage":"8Gi"`)
	f.node("node-a", nil, &adminv1.Volume{PodUid: "uid", GrowToBytes: 16 << 30, GrowWaits: "it grows with a new pod"})
	r.pod.Spec.NodeName, r.pod.Metadata.UID, grows = "node-a", "uid", 1 // as with Kata
	_, err = r.growth(t.Context())
	_, left := errors.AsType[skipped](err)
	check.That(t, left && strings.Contains(err.Error(), "16GiB, and the filesystem waits: it grows with a new pod"), "growth that waits: %v", err)
	for now, want := range map[string]string{"Delete": "<nil>", "Retain": "pv-1 and its disk are retained", "": "pv-1 may be left"} {
		policy, gets = now, 0
		_, err := r.clean(t.Context())
		f.wants(fmt.Sprint(err), want)
		check.That(t, policy != "Delete" || gets == 2, "the disk was looked at %d times", gets)
	}
}

// TestMain is kubectl crust if there are arguments for it.
func TestMain(m *testing.M) {
	if args := os.Getenv("KUBECTL_CRUST_ARGS"); args != "" {
		os.Exit(Main(strings.Fields(args)))
	}
	os.Exit(m.Run())
}

// TestTrialCleansUpAlone: so it is if the terminal is closed, of which there are two signals, or nobody reads on.
func TestTrialCleansUpAlone(t *testing.T) {
	for _, hangups := range []int{0, 2} {
		f := newFake(t)
		cmd := exec.Command(os.Args[0]) // #nosec G204 -- this test
		var once sync.Once
		started := make(chan struct{})
		reader, writer, err := os.Pipe()
		check.Must(t, err)
		left := f.trialServer(func() {
			once.Do(func() {
				<-started
				check.Must(t, reader.Close())
				for range hangups {
					check.Must(t, cmd.Process.Signal(syscall.SIGHUP))
					time.Sleep(50 * time.Millisecond) // so that each arrives
				}
			})
		})
		cmd.Env = append(os.Environ(), "KUBECTL_CRUST_ARGS=test --storage-class=fast --step-timeout=6s --kubeconfig="+f.kubeconfig)
		cmd.Stdout = writer
		check.Must(t, cmd.Start())
		close(started)
		_ = cmd.Wait()
		_ = writer.Close()
		check.That(t, cmd.ProcessState.ExitCode() == command.ExitFindings && len(left()) == 0, "%d signals: %s, left %v", hangups, cmd.ProcessState, left())
	}
}
