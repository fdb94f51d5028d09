// Browsers refuse workers to pages that are opened from a folder. There, the worker of the search runs in a hidden frame.
if (location.protocol === "file:") {
  window.Worker = class extends EventTarget {
    constructor(url) {
      super()
      this.waiting = []
      this.frame = document.createElement("iframe")
      this.frame.hidden = true
      this.frame.addEventListener("load", () => this.start(url), { once: true })
      document.body.append(this.frame)
    }

    start(url) {
      const inside = this.frame.contentWindow
      inside.postMessage = data => this.dispatchEvent(new MessageEvent("message", { data }))
      const script = inside.document.createElement("script")
      script.src = url
      script.addEventListener("load", () => {
        this.deliver = data => inside.dispatchEvent(new inside.MessageEvent("message", { data }))
        this.waiting.splice(0).forEach(this.deliver)
      })
      inside.document.body.append(script)
    }

    postMessage(data) {
      this.deliver ? this.deliver(data) : this.waiting.push(data)
    }

    terminate() {
      this.frame.remove()
    }
  }
}
