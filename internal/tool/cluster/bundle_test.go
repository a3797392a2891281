package cluster

import (
	"archive/tar"
	"bytes"
	"compress/gzip"
	"errors"
	"fmt"
	"io"
	"net/http"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/crust-proxy/crust-proxy/internal/tool/printer"
	adminv1 "github.com/crust-proxy/crust-proxy/proto/crust/admin/v1"
	"github.com/crust-proxy/crust-proxy/test/check"
)

// The secrets of the tests have this in them, and these forms.
const hidden = "HunTer2"

func hiddenForms() []string {
	return []string{
		"password=" + hidden, `{"a":"secret \\\"x\\\": password=\"` + hidden + `\\\" ` + hidden + `\""}`, `{"password":"a\\\"` + hidden + `"}`, "mount failed: vers=3,passwd=" + hidden + ",rw", `{"token": "` + hidden + ` with \u0041 \n more"}`, `{\"apiKey\":\"` + hidden + `\"}`,
		"db-password: " + hidden + " of two words", "client_secret: '" + hidden + " x'", "Authorization: Bearer " + hidden + "0123456789",
		"https://user:" + hidden + "@server/path", "eyJhbGciOiJIUzI1NiJ9.eyJ" + hidden + "In0.x" + hidden, "AKIA" + strings.ToUpper(hidden) + "012345678",
		"github_pat_" + hidden + "0123456789abcdef", "glpat-" + hidden + "0123456789", "https://a/b?sv=1&sig=" + hidden + "%3D&se=2", "https://a/b?X-Amz-Signature=" + hidden + "0a",
		"-----BEGIN RSA PRIVATE KEY-----\n" + hidden + "\n-----END RSA PRIVATE KEY-----", "tls:\n  private-key: |\n    " + hidden + "\n    " + hidden + "\nnext: shown",
		"CHAP: node.session.auth.chap_password = " + hidden,
		"    client-key-data: " + hidden, "userKey: " + hidden, `encryptionKey: "` + hidden + `"`, "GET /?key=" + hidden + "&x=y", "auth: " + hidden, "user=a,pwd=" + hidden + ",rw",
		"passwords:\n- " + hidden + "\n- a " + hidden, "- tokens:\n  - " + hidden, "passwords: [a,\n  " + hidden + "]", "run --password " + hidden + " x",
		`args: ["--client-secret", "a ` + hidden + `"]`, `password: ab"cd ` + hidden, `password=ab"cd` + hidden, "key: x\n  -----BEGIN PRIVATE KEY-----\n" + hidden + "\n-----END PRIVATE KEY-----",
	}
}

// TestRedact removes each form, where nothing before it hides it, and leaves what stands next to it.
func TestRedact(t *testing.T) {
	for _, form := range hiddenForms() {
		got := string(redact([]byte(form + "\n")))
		check.That(t, !strings.Contains(strings.ToLower(got), strings.ToLower(hidden)), "of %q is left %q", form, got)
	}
	for _, plain := range []string{"- name: a\n  mode: x\n", "vers=3,rw\n", "drivers:\n- name: ebs\n- name: lvm\n"} {
		got := string(redact([]byte("- password: x\n" + plain)))
		check.That(t, strings.HasSuffix(got, "\n"+plain), "of %q is left %q", plain, got)
	}
}

// TestNoSecretInABundle: what is put into every place that is read, in every form, is in no file.
func TestNoSecretInABundle(t *testing.T) {
	f := newFake(t)
	all := strings.Join(hiddenForms(), "\n")
	view := sick()
	view.Node.Findings, view.Node.HttpProblem, view.Node.ProofReason = hiddenForms(), all, all
	view.Handlers.Handlers[0].Problem, view.Handlers.Handlers[0].Healthy, view.Drivers.Drivers[0].Problem = all, false, all
	var list []*adminv1.Volume
	for _, form := range hiddenForms() {
		list = append(list, &adminv1.Volume{Id: "a", LastError: form, MountFlags: []string{form}, Condition: &adminv1.VolumeCondition{Abnormal: true, Message: form}})
	}
	f.podsToo, f.message = []object{{"name": "A", "value": hidden}}, all
	f.volumes = []object{{"configMap": object{"name": "conf"}}, {"secret": object{"secretName": "never"}}}
	f.node("node-a", view, list[:2]...)
	serve := func(path, body string) {
		f.mux.HandleFunc(path, func(w http.ResponseWriter, _ *http.Request) { _, _ = io.WriteString(w, body) })
	}
	const space = "GET /api/v1/namespaces/system"
	serve(space+"/pods/crust-node-a:99/proxy/metrics", all+"\n"+strings.Repeat("x_total{volume=\"abcdefgh\"} 1\n", mostFile/25))
	serve(space+"/pods/crust-node-a:99/proxy/readyz", all)
	serve(space+"/pods/crust-node-a/log", strings.Repeat("old\n", mostFile/4)+all+fmt.Sprintf("\n{\"msg\":%q}\n{\"error\":%q}\nthe newest\n", all, fmt.Sprintf("%q", all)))
	f.mux.HandleFunc(space+"/events", func(w http.ResponseWriter, _ *http.Request) {
		f.answer(w, map[string]any{"items": []any{map[string]any{"reason": "Failed", "message": all}}})
	})
	f.mux.HandleFunc(space+"/configmaps/conf", func(w http.ResponseWriter, _ *http.Request) {
		f.answer(w, map[string]any{"data": map[string]string{"config.yaml": all + "\nlog: {level: debug}\n"}})
	})
	f.pod("node-c", "Pending") // has no log, and is no error
	file := filepath.Join(t.TempDir(), "bundle.tar.gz")
	f.wants(f.run("bundle", "--file="+file), file+": 2 nodes", "exit 3\n")
	f.wants(f.run("bundle", "--file="+file), "file exists", "exit 1\n")
	f.wants(f.run("bundle", "-o", "json", "--file="+file+"2"), "{\n", `"nodes": 2,`, `"notIncluded": [`)
	files := unpack(t, file)
	for name, text := range files {
		check.That(t, !strings.Contains(strings.ToLower(text), strings.ToLower(hidden)), "%s has a secret:\n%.2000s", name, text)
	}
	f.wants(files["crust-bundle/not-included.txt"], "nodes/node-a/log.txt: the beginning of 4")
	for name, words := range map[string]string{
		"check.txt": "fail driver lvm", "nodes/node-a/node.json": `"configDigest": "cdcd`, "nodes/node-a/volumes.json": `"lastError": `,
		"nodes/node-a/metrics.txt": "... cut off", "nodes/node-a/readyz.txt": removed, "nodes/node-a/log.txt": "next: shown", "nodes/node-a/log-previous.txt": "\nthe newest\n",
		"nodes/node-a/pod.json": `"NodeName": "node-a"`, "nodes/node-a/events.json": `"Failed"`, "config/conf/config.yaml": "log: {level: debug}",
		"not-included.txt": "nodes/node-c/volumes.json: pod crust-node-c does not run", "version.txt": "kubectl crust",
	} {
		check.That(t, strings.Contains(files["crust-bundle/"+name], words), "%s lacks %q:\n%.1000s", name, words, files["crust-bundle/"+name])
	}
}

// TestABundleOfManyNodes: nodes are read some at a time, one that did not answer is not asked again, and in an archive
// that is full is at least the list of what is missing.
func TestABundleOfManyNodes(t *testing.T) {
	f := newFake(t)
	f.volumes = []object{{"configMap": object{"name": "conf"}}}
	var both sync.WaitGroup
	both.Add(2)
	for _, name := range []string{"node-a", "node-b"} {
		var once sync.Once
		f.node(name, healthy())
		f.mux.HandleFunc("GET /api/v1/namespaces/system/pods/crust-"+name+"/log", func(w http.ResponseWriter, _ *http.Request) {
			once.Do(both.Done)
			both.Wait()
			_, _ = io.WriteString(w, "a log")
		})
	}
	f.mux.HandleFunc("GET /api/v1/namespaces/system/configmaps/conf", func(w http.ResponseWriter, _ *http.Request) {
		f.answer(w, map[string]any{"data": map[string]string{"config.yaml": "a: b"}})
	})
	f.mux.HandleFunc(f.pod("node-c", "Running")+"/metrics", func(http.ResponseWriter, *http.Request) { t.Error("asked again") })
	tool := &tool{access: access{kubeconfig: f.kubeconfig, patience: 10 * time.Second}, out: &printer.Printer{Out: io.Discard}, now: time.Now}
	all, k, err := tool.places(t.Context(), "")
	check.Must(t, err)
	var out bytes.Buffer
	a := &archive{t: tool, k: k, tar: tar.NewWriter(&out)}
	a.fill(t.Context(), tool.ask(t.Context(), all, askAll))
	check.Must(t, a.err)
	reader := tar.NewReader(&out)
	header := check.Value(reader.Next())(t)
	body := check.Value(io.ReadAll(reader))(t)
	last := 0
	for _, name := range []string{"check.txt", "config/conf/config.yaml", "nodes/node-a/log.txt", "nodes/node-b/log.txt"} {
		at := bytes.Index(body, []byte(name+": the archive is full\n"))
		check.That(t, header.Name == "crust-bundle/not-included.txt" && at >= last, "%s is at %d of %s:\n%s", name, at, header.Name, body)
		last = at
	}
}

func unpack(t *testing.T, name string) map[string]string {
	t.Helper()
	raw := check.Value(os.ReadFile(name))(t)
	zip := check.Value(gzip.NewReader(bytes.NewReader(raw)))(t)
	files, reader := map[string]string{}, tar.NewReader(zip)
	for {
		header, err := reader.Next()
		if errors.Is(err, io.EOF) {
			return files
		}
		check.Must(t, err)
		files[header.Name] = string(check.Value(io.ReadAll(reader))(t))
	}
}

func TestAnArchiveIsBounded(t *testing.T) {
	var cut part
	cut.json("x.json", strings.Split(strings.Repeat("volume ", mostFile/7), " "), nil)
	check.That(t, cut.files[0].name == "x.json.part" && len(cut.skip) == 1 && strings.Contains(cut.skip[0], "cut off"), "%s is cut off, and noted is %q", cut.files[0].name, cut.skip)
	var out bytes.Buffer
	a := &archive{tar: tar.NewWriter(&out), left: 3 * mostFile}
	for i := range 5 {
		var p part
		p.add(fmt.Sprint(i), bytes.Repeat([]byte(strings.Repeat("a", 63)+"\n"), mostFile/32))
		a.write(p)
	}
	check.Must(t, a.err)
	a.skip = slices.DeleteFunc(a.skip, func(text string) bool { return strings.Contains(text, "cut off") })
	check.That(t, (len(a.skip) == 2 || len(a.skip) == 3) && out.Len() <= 3*mostFile+1<<16, "%d bytes, left out %q", out.Len(), a.skip)
}
