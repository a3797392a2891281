//go:build system

package admission

import (
	"strings"
	"testing"

	corev1 "k8s.io/api/core/v1"
	nodev1 "k8s.io/api/node/v1"
	"k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"

	"github.com/crust-proxy/crust-proxy/internal/front/policy"
	"github.com/crust-proxy/crust-proxy/test/check"
)

func quantity(text string) resource.Quantity { return resource.MustParse(text) }

func TestPods(t *testing.T) {
	r := start(t)
	r.install(t)
	r.inForce(t)
	const ours = "driver.crust-proxy.dev"
	names := func(count int) string { return "data" + strings.Repeat(",data", count-1) }
	for what, is := range map[string]struct {
		pod  *corev1.Pod
		want []string
	}{
		"asks by name":                     {pod("kata", annotated("data"), claim("data")), nil},
		"asks for two, with spaces":        {pod("crust", annotated(" data , more"), claim("data"), claim("more")), nil},
		"asks for all":                     {pod("kata", annotated("*"), claim("data"), scratch("tmp")), nil},
		"asks for all, with spaces":        {pod("kata", annotated("  * "), claim("data")), nil},
		"asks for nothing":                 {pod("", annotated(""), claim("data", subPath)), nil},
		"asks for an ephemeral volume":     {pod("kata", annotated("scratch"), ephemeral("scratch")), nil},
		"64 names":                         {pod("kata", annotated(names(64)), claim("data")), nil},
		"no annotation, no class":          {pod("", claim("data", subPath), inline("smb", "smb.csi.k8s.io", "login")), nil},
		"no annotation, class by wish":     {pod("kata", claim("data", subPath)), nil},
		"another volume has a subPath":     {pod("kata", annotated("data"), claim("data"), claim("other", subPath)), nil},
		"subPath with a class that can":    {pod("crust", annotated("data"), claim("data", subPath), initMounts("data")), nil},
		"no volumes at all, class of all":  {pod("vm"), nil},
		"inline of a driver that defers":   {pod("kata", annotated("data"), inline("data", ours, "")), nil},
		"the same with a secret":           {pod("kata", annotated("data"), inline("data", ours, "key")), nil},
		"inline that is not asked for":     {pod("kata", annotated("data"), claim("data"), inline("smb", "smb.csi.k8s.io", "login")), nil},
		"raw block beside all":             {pod("kata", annotated("*"), claim("data"), device("disk")), nil},
		"a class of all with subPath":      {pod("vm", claim("data", subPathExpr)), []string{"the volume data is to be deferred", "subPath", "runtime class vm", "(crust)"}},
		"a class of all with raw block":    {pod("vm", device("disk")), nil},
		"a class of all and scratch space": {pod("vm", scratch("tmp")), nil},

		"no words":           {pod("kata", annotated("data;more"), claim("data")), []string{"cannot be read", "commas between, or * alone"}},
		"capitals":           {pod("kata", annotated("Data"), claim("data")), []string{"cannot be read"}},
		"a star among names": {pod("kata", annotated("data,*"), claim("data")), []string{"cannot be read"}},
		"an empty name":      {pod("kata", annotated("data,"), claim("data")), []string{"cannot be read"}},
		"a tab":              {pod("kata", annotated("data\t"), claim("data")), []string{"cannot be read"}},
		"a line":             {pod("kata", annotated("data\n"), claim("data")), []string{"cannot be read"}},
		"only a space":       {pod("kata", annotated(" "), claim("data")), []string{"cannot be read"}},
		"65 names":           {pod("kata", annotated(names(65)), claim("data")), []string{"at most 64 volumes"}},
		"too long":           {pod("kata", annotated("data"+strings.Repeat(" ", 9000)), claim("data")), []string{"cannot be read"}},
		"no such volume": {
			pod("kata", annotated("data,date,dates"), claim("data"), scratch("tmp")),
			[]string{"names date, dates,", "(it has: data)", "correct the annotation"},
		},
		"scratch space":        {pod("kata", annotated("tmp"), scratch("tmp")), []string{"names tmp,", "(it has: none)"}},
		"raw block":            {pod("kata", annotated("data,disk"), claim("data"), device("disk")), []string{"names disk, which is a raw block volume"}},
		"no runtime class":     {pod("", annotated("data"), claim("data")), []string{"the pod has no runtime class", "set runtimeClassName to one of kata, crust, vm"}},
		"subPath":              {pod("kata", annotated("data"), claim("data", subPath)), []string{"the volume data is", "mount the whole volume", "(crust)"}},
		"subPathExpr and all":  {pod("kata", annotated("*"), claim("data", subPathExpr)), []string{"the volume data is"}},
		"subPath of the first": {pod("kata", annotated("data"), claim("data"), initMounts("data")), []string{"the volume data is"}},
		"inline":               {pod("crust", annotated("*"), inline("cert", "csi.cert-manager.io", "")), []string{"the inline volume cert (csi.cert-manager.io)", "use a claim"}},
		"inline with secret":   {pod("vm", inline("share", "smb.csi.k8s.io", "login")), []string{"the inline volume share", "nodePublishSecretRef", "SMB"}},
	} {
		t.Run(what, func(t *testing.T) {
			_, err := r.dry(t, is.pod)
			err = says(err, "pods", is.want...)
			check.That(t, err == nil, "%v", err)
			agrees(t, is.pod, is.want)
		})
	}
	// A class that is there, and that nobody said mounts volumes.
	plain := &nodev1.RuntimeClass{ObjectMeta: metav1.ObjectMeta{Name: "plain"}, Handler: "runc"}
	check.Must(t, check.Err(r.client.NodeV1().RuntimeClasses().Create(t.Context(), plain, metav1.CreateOptions{})))
	await(t, "the runtime class", func() bool { _, err := r.dry(t, pod("plain", claim("data"))); return err == nil })
	_, err := r.dry(t, pod("plain", annotated("data"), claim("data")))
	err = says(err, "pods", "the runtime class plain is not known to mount volumes by itself", "one of kata, crust, vm")
	check.That(t, err == nil, "%v", err)
	livingPods(t, r)
}

// agrees compares with the daemon: what one calls unreadable, so does the other.
func agrees(t *testing.T, p *corev1.Pod, want []string) {
	t.Helper()
	unreadable := len(want) > 0 && (strings.Contains(want[0], "cannot be read") || strings.Contains(want[0], "at most 64"))
	_, err := policy.ParseAnnotation(p.Annotations[policy.AnnotationKey])
	check.That(t, (err != nil) == unreadable, "the daemon says %v of the annotation", err)
}

// livingPods: what was said of a pod's volumes stands as long as the pod.
func livingPods(t *testing.T, r *rig) {
	t.Helper()
	pods := r.client.CoreV1().Pods("default")
	patch := func(name, annotations string) error {
		_, err := pods.Patch(t.Context(), name, types.MergePatchType, []byte(`{"metadata":{"annotations":`+annotations+`}}`), metav1.PatchOptions{})
		return err
	}
	for _, is := range []struct{ before, change, want string }{
		{"data", `{"crust-proxy.dev/defer": "*"}`, "cannot be changed"},
		{"data", `{"crust-proxy.dev/defer": null}`, "cannot be changed"},
		{"", `{"crust-proxy.dev/defer": "data"}`, "cannot be changed"},
		{"data", `{"example.com/other": "word"}`, ""},
		{"data", `{"crust-proxy.dev/defer": "data"}`, ""},
		{"", `{"crust-proxy.dev/defer": null}`, ""},
	} {
		p := pod("kata", claim("data"), annotated(is.before))
		made := check.Value(pods.Create(t.Context(), p, metav1.CreateOptions{}))(t)
		var words []string
		if is.want != "" {
			words = []string{is.want, "Delete the pod"}
		}
		check.NoError(t, says(patch(made.Name, is.change), "living-pods", words...), "%q changed by %s", is.before, is.change)
	}
}
